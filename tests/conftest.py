"""Marks the slow tests, which tests/slow.txt names; cases of soak tests; fixtures of many files."""

from pathlib import Path

import pytest

from tests.soak import SoakCase


def slow_tests() -> list[str]:
    """Return the lines of the list: files, functions and cases."""
    lines = Path(__file__).with_name("slow.txt").read_text(encoding="utf-8").splitlines()
    return [line for line in lines if not line.startswith("#")]


def leaves_slow_tests_out(config: pytest.Config) -> bool:
    return "not slow" in config.getoption("markexpr")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Do not even import a file of slow tests where they are left out: some import packages for many seconds."""
    name = collection_path.relative_to(Path(__file__).parents[1]).as_posix()
    return True if leaves_slow_tests_out(config) and name in slow_tests() else None


@pytest.hookimpl(tryfirst=True)  # before -k and -m leave something out
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark every test whose file, function or case is a line of the list; of the whole suite, each line must name one."""
    slow = dict.fromkeys(slow_tests())  # as a set, in order
    found = set()
    for item in items:
        file, test = item.nodeid.split("::", 1)
        named = slow.keys() & {file, item.nodeid, f"{file}::{test.partition('[')[0]}"}
        found |= named
        if named:
            item.add_marker(pytest.mark.slow)
    is_whole_suite = config.args_source == pytest.Config.ArgsSource.TESTPATHS and not leaves_slow_tests_out(config)
    if is_whole_suite and slow.keys() > found:
        names = ", ".join(sorted(slow.keys() - found))
        raise pytest.UsageError(f"tests/slow.txt names what is no test (any more): {names}")
    if hasattr(config, "workerinput"):
        # pytest-xdist hands out whole files in this order: one that takes long must not be the last.
        places = {file: place for place, file in enumerate(dict.fromkeys(line.partition("::")[0] for line in slow))}
        items.sort(key=lambda item: places.get(item.nodeid.partition("::")[0], len(places)))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--soak", type=int, metavar="CASES", help="cases of each soak test (default: a few)")
    parser.addoption("--soak-seed", type=int, default=0, metavar="SEED", help="of the cases of soak tests")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "soak_case" in metafunc.fixturenames:
        (few,) = metafunc.definition.get_closest_marker("soak").args
        wanted, seed = metafunc.config.getoption("soak"), metafunc.config.getoption("soak_seed")
        cases = [SoakCase(seed, number) for number in range(few if wanted is None else wanted)]
        metafunc.parametrize("soak_case", cases, ids=str)


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> str:
    """``--train-data`` of a file's own small demo set."""
    from tests.training.runs import make_shards

    return make_shards(tmp_path_factory.mktemp("shards"))
