"""Tables of per-sample state: written values are read again, unwritten values are NaN, and a write can be undone."""

import pytest
import torch

from openclip_ext.state.sharded_table import ShardedTable


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
