"""Fixtures: a single torch thread, for bitwise comparisons, and reference runs that several test files share."""

from collections.abc import Iterator

import pytest
import torch

from tests.training.programs import Runs
from tests.training.runs import make_shards


@pytest.fixture(autouse=True, scope="package")  # before the runs of fixtures with a smaller scope
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """Return the reference runs: uninterrupted runs to compare with, and stopped runs that tests may damage."""
    folder = tmp_path_factory.mktemp("runs")
    return Runs(make_shards(folder / "shards"), folder)
