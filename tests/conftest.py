"""Mark the tests of the second tier (listed in tests/all.txt), generate soak cases, and define shared fixtures."""

from pathlib import Path

import pytest

from tests.soak import SoakCase


def second_tier() -> list[str]:
    """Return the lines of tests/all.txt: each is the beginning of test names, up to a folder, a file, a test or a case."""
    lines = Path(__file__).with_name("all.txt").read_text(encoding="utf-8").splitlines()
    return [line for line in lines if not line.startswith("#")]


def _leaves_it_out(config: pytest.Config) -> bool:
    return "not second_tier" in config.getoption("markexpr")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """If the second tier is excluded, do not import its files, because they may need packages that are not installed."""
    name = collection_path.relative_to(Path(__file__).parents[1]).as_posix()
    return True if _leaves_it_out(config) and {name, f"{name}/"} & {*second_tier()} else None


@pytest.hookimpl(tryfirst=True)  # runs before -k and -m exclude tests
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark every test that a line of tests/all.txt refers to. In the full suite, each line must refer to a test or a file."""
    lines = second_tier()
    root = Path(__file__).parents[1]
    # If a package is missing, all tests of a file may be skipped.
    unused = {line for line in lines if not (root / line).exists()}
    for item in items:
        if named := {line for line in lines if item.nodeid.startswith(line)}:
            item.add_marker(pytest.mark.second_tier)
            unused -= named
    is_whole_suite = config.args_source == pytest.Config.ArgsSource.TESTPATHS and not _leaves_it_out(config)
    if is_whole_suite and unused:
        raise pytest.UsageError(f"tests/all.txt: no such tests, remove the lines: {', '.join(sorted(unused))}")
    if hasattr(config, "workerinput"):
        # pytest-xdist distributes files in this order. A slow file must not come last, because its worker would run alone.
        files = [line.partition("::")[0] for line in lines]
        items.sort(key=lambda item: [not item.nodeid.startswith(file) for file in files])


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--soak", type=int, metavar="CASES", help="number of cases per soak test (default: a few)")
    parser.addoption("--soak-seed", type=int, default=0, metavar="SEED", help="seed of all soak cases (default: 0)")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "soak_case" in metafunc.fixturenames:
        (few,) = metafunc.definition.get_closest_marker("soak").args
        wanted, seed = metafunc.config.getoption("soak"), metafunc.config.getoption("soak_seed")
        cases = [SoakCase(seed, number) for number in range(few if wanted is None else wanted)]
        metafunc.parametrize("soak_case", cases, ids=str)


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the ``--train-data`` of a small demo data set, which is made once per test file."""
    from tests.training.runs import make_shards

    return make_shards(tmp_path_factory.mktemp("shards"))
