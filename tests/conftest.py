"""Marks the slow tests, which tests/slow.txt names."""

from pathlib import Path

import pytest

SLOW = Path(__file__).with_name("slow.txt")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark what the list names.

    Raises:
        pytest.UsageError: the list names a file that does not exist, or a test that is not in its file.
    """
    names = {line for line in SLOW.read_text(encoding="utf-8").splitlines() if line and not line.startswith("#")}
    used, files = set(), set()
    for item in items:
        file, _, test = item.nodeid.partition("::")
        files.add(file)
        found = names & {file, item.nodeid, f"{file}::{test.partition('[')[0]}"}
        if found:
            item.add_marker(pytest.mark.slow)
            used |= found
    selected = any("::" in argument for argument in config.args) or config.getoption("lf", False)
    stale = [
        name
        for name in sorted(names - used)
        for file in [name.partition("::")[0]]
        if not (config.rootpath / file).exists() or (file in files and not selected)
    ]
    if stale:
        raise pytest.UsageError(f"{SLOW} names what does not exist: {', '.join(stale)}. Rename or remove it there.")
