"""Tables of per-sample state, and their files, which another number of ranks and NumPy can read."""

from pathlib import Path

import numpy as np
import pytest
import torch

from openclip_ext import distributed
from openclip_ext.cli.errors import UsageError
from openclip_ext.state import table_files
from openclip_ext.state.sharded_table import ShardedTable, shard_bounds
from openclip_ext.state.table_files import open_table, restore_table, write_table

SAMPLES = 103


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(table_files, "CHUNK_ROWS", 8)


@pytest.fixture
def as_rank(monkeypatch):
    """Return a function that makes this process create tables like one rank of several."""

    def pretend(rank: int, world_size: int) -> None:
        monkeypatch.setattr(distributed, "rank", lambda: rank)
        monkeypatch.setattr(distributed, "world_size", lambda: world_size)

    return pretend


def numbers(dtype=torch.float32) -> torch.Tensor:
    """Return table values ``(columns, SAMPLES)``; every third sample and a full chunk are unwritten (NaN)."""
    values = torch.randn(3, SAMPLES, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(dtype)
    values[:, ::3] = float("nan")
    values[:, 40:60] = float("nan")
    values[0, 1], values[1, 1] = -0.0, float("-inf")
    return values


def filled(values: torch.Tensor) -> ShardedTable:
    """Return a table with this rank's shard of ``values``."""
    table = ShardedTable(3, SAMPLES).to(values.dtype)
    table.set_rows(0, values[:, table.first : table.end].T)
    return table


def write(table: ShardedTable, path: Path) -> Path:
    with open(path, "wb") as file:
        write_table(table, file)
    return path


def assert_same(table: ShardedTable, values: torch.Tensor) -> None:
    torch.testing.assert_close(table.rows(0, table.size).T, values, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("worlds", [(1, 2, 1), (2, 1, 2), (3, 2, 7), (1, 1, 1)])
def test_tables_move_between_numbers_of_ranks(tmp_path, as_rank, worlds, dtype):
    values = numbers(dtype)
    for generation, world_size in enumerate(worlds):
        for rank in range(world_size):
            as_rank(rank, world_size)
            if generation == 0:
                table = filled(values)
            else:
                table = ShardedTable(3, SAMPLES).to(dtype)
                previous = [tmp_path / f"{generation - 1}.{old}.npy" for old in range(worlds[generation - 1])]
                restore_table(table, [open_table(path) for path in previous])
            first, end = shard_bounds(SAMPLES, rank, world_size)
            assert_same(table, values[:, first:end])
            write(table, tmp_path / f"{generation}.{rank}.npy")


def test_a_used_table_is_overwritten_with_what_was_never_written(tmp_path):
    path = write(filled(numbers()), tmp_path / "table.npy")
    table = filled(torch.ones(3, SAMPLES))
    restore_table(table, [open_table(path)])
    assert_same(table, numbers())


def test_numpy_reads_a_file_and_finds_the_numbers(tmp_path):
    stored = np.load(write(filled(numbers()), tmp_path / "table.npy"), mmap_mode="r")
    assert (stored.shape, stored.dtype.str) == ((SAMPLES, 3), "<f4")
    assert np.array_equal(np.asarray(stored).T, numbers().numpy(), equal_nan=True)


def test_tables_of_other_losses_and_data_are_rejected(tmp_path):
    path = write(filled(numbers()), tmp_path / "table.npy")
    with pytest.raises(UsageError, match="expected a table of 103 samples with 2 numbers each, found 103 with 3"):
        restore_table(ShardedTable(2, SAMPLES), [open_table(path)])
    with pytest.raises(UsageError, match="found 206 with 3"):
        restore_table(ShardedTable(3, SAMPLES), [open_table(path), open_table(path)])
    assert ShardedTable(2, SAMPLES).load_state_dict({}, strict=False).missing_keys == ["shard"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_values_come_back_and_only_what_was_never_written_is_missing(dtype: torch.dtype) -> None:
    special = torch.tensor([0.0, -1.5, float("inf"), float("-inf"), 1e-40, 3e38], dtype=dtype)
    table, written = ShardedTable(1, 20).to(dtype), torch.arange(6)
    table.write(written, special[None], written != 1)
    assert torch.equal(table.read(written[2:])[0], special[2:])
    assert torch.isnan(table.read(torch.tensor([1, 19]))).all()
    missing = torch.full((1, 3), 7.0, dtype=dtype)
    assert table.read(torch.tensor([1, 0, 19]), missing=missing).tolist() == [[7.0, 0.0, 7.0]]


@pytest.mark.parametrize("unless", [None, True, False])
def test_a_write_can_be_undone(unless: bool | None) -> None:
    table, everything = ShardedTable(2, 20), torch.arange(20)

    def write(index: list[int], values: list[float]) -> torch.Tensor:
        table.write(torch.tensor(index), torch.tensor([values, values]), torch.ones(len(index), dtype=torch.bool))
        return table.read(everything)

    before = write([3, 5], [1.0, 2.0])
    after = write([3, 3, 7], [5.0, 5.0, 6.0])
    table.undo_write(None if unless is None else torch.tensor(unless))
    left = after if unless else before
    torch.testing.assert_close(table.read(everything), left, rtol=0, atol=0, equal_nan=True)
    table.undo_write()  # no effect: only the last write can be undone
    torch.testing.assert_close(table.read(everything), left, rtol=0, atol=0, equal_nan=True)
    assert after[:, 7].tolist() == [6.0, 6.0]
