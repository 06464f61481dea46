"""Marks the slow tests, which tests/slow.txt names."""

from pathlib import Path

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark every test whose file, function or case is a line of the list."""
    slow = set(Path(__file__).with_name("slow.txt").read_text(encoding="utf-8").splitlines())
    for item in items:
        file, test = item.nodeid.split("::", 1)
        if slow & {file, item.nodeid, f"{file}::{test.partition('[')[0]}"}:
            item.add_marker(pytest.mark.slow)
