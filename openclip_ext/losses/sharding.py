"""Per-sample state, split over the processes by contiguous ranges of the index."""

import math
from typing import Any

import torch
from torch import Tensor, nn

from openclip_ext import distributed

_SHARD = "shard"


def shard_bounds(num_samples: int, rank: int, world_size: int) -> tuple[int, int]:
    """The range of indices process ``rank`` keeps: ``⌈n/K⌉`` each, less at the end."""
    per_rank = math.ceil(num_samples / world_size)
    first = min(rank * per_rank, num_samples)
    return first, min(first + per_rank, num_samples)


class ShardedTable(nn.Module):
    """``columns`` numbers for each of ``num_samples`` samples, of which this process keeps its range only.

    Reading costs one all-reduce of ``columns·B`` scalars (the owner contributes, the others add zero); writing is local.

    Args:
        columns: numbers per sample.
        num_samples: size ``n`` of the index space.
        fill: value of a sample that was never written. NaN can be told from every value that is written.
    """

    def __init__(self, columns: int, num_samples: int, fill: float = float("nan")) -> None:
        super().__init__()
        self.num_samples = num_samples
        self.world_size = distributed.world_size()
        self.first, self.end = shard_bounds(num_samples, distributed.rank(), self.world_size)
        # The last column takes the writes that belong to other processes: no shape depends on data.
        self.register_buffer("values", torch.full((columns, self.end - self.first + 1), fill), persistent=False)

    def _slots(self, index: Tensor, write: Tensor | None = None) -> tuple[Tensor, Tensor]:
        if distributed.world_size() != self.world_size:
            raise RuntimeError(
                f"the loss was created with {self.world_size} process(es) and is used with {distributed.world_size()}: "
                "create it after torch.distributed.init_process_group"
            )
        mine = (index >= self.first) & (index < self.end)
        if write is not None:
            mine = mine & write
        return torch.where(mine, index - self.first, self.end - self.first), mine

    @torch.no_grad()
    def read(self, index: Tensor, columns: slice = slice(None)) -> Tensor:
        """Values of the samples ``index`` ``(B,)``, the same on every process: ``(columns, B)``, or some of the columns."""
        slots, mine = self._slots(index)
        values = torch.where(mine, self.values[columns, slots], 0)
        return distributed.all_reduce_sum(values) if self.world_size > 1 else values

    @torch.no_grad()
    def write(self, index: Tensor, values: Tensor, where: Tensor) -> None:
        """Store ``values`` ``(columns, B)`` of the samples for which ``where`` ``(B,)`` holds.

        Equal indices must come with equal values (see :func:`log_mean_of_equal`).
        """
        slots, _ = self._slots(index, where)
        self.values[:, slots] = values.to(self.values.dtype)

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + _SHARD] = self.values[:, :-1]

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        missing = args[2]
        key = prefix + _SHARD
        if key not in state_dict:
            missing.append(key)
            return
        shard = state_dict[key]
        own = self.values[:, :-1]
        if shard.shape != own.shape:
            raise ValueError(
                f"{key} has shape {tuple(shard.shape)}, this process keeps {tuple(own.shape)}: the state is of another "
                "number of samples or of processes (for the latter use openclip_ext.losses.sharding.reshard)"
            )
        with torch.no_grad():
            own.copy_(shard)


def is_sharded(key: str) -> bool:
    """Whether a key of a loss's ``state_dict`` holds one process's part of a table."""
    return key.rpartition(".")[2] == _SHARD


def reshard(states: list[dict[str, Any]], rank: int, world_size: int) -> dict[str, Any]:
    """The state of a loss for another number of processes.

    Args:
        states: ``state_dict()`` of the loss on every old process, in the order of their ranks.
        rank, world_size: the new process.

    Returns:
        What to give to ``load_state_dict`` there.

    Raises:
        ValueError: if there are no states.
    """
    if not states:
        raise ValueError("reshard needs the state of every old process, found none")
    state = dict(states[0])
    for key in filter(is_sharded, states[0]):
        table = torch.cat([old[key] for old in states], dim=1)
        first, end = shard_bounds(table.shape[1], rank, world_size)
        state[key] = table[:, first:end].clone()
    return state


def log_mean_of_equal(index: Tensor, log_values: Tensor, valid: Tensor) -> Tensor:
    """Give all occurrences of an index the mean of their values, in log space.

    Args:
        index: ``(B,)``.
        log_values: ``(rows, B)`` logarithms of the values.
        valid: ``(B,)``, which samples count.

    Returns:
        ``(rows, B)`` logarithms of the means.
    """
    group, size = _groups(index, valid)
    group = group.expand_as(log_values)
    masked = torch.where(valid, log_values, -torch.inf)
    largest = torch.full_like(log_values, -torch.inf).scatter_reduce(1, group, masked, "amax").gather(1, group)
    # Sums in double precision: on a GPU their order is not fixed, and so rounding hides it.
    shares = torch.where(valid & torch.isfinite(largest), (masked - largest).double().exp(), 0)
    sums = torch.zeros_like(shares).scatter_add(1, group, shares).gather(1, group)
    return largest + (sums / size).log().to(log_values.dtype)


def mean_of_equal(index: Tensor, values: Tensor, valid: Tensor) -> Tensor:
    """As :func:`log_mean_of_equal`, of the values ``(rows, B)`` themselves."""
    group, size = _groups(index, valid)
    group = group.expand_as(values)
    wide = torch.where(valid, values, 0).double()
    sums = torch.zeros_like(wide).scatter_add(1, group, wide).gather(1, group)
    return (sums / size).to(values.dtype)


def _groups(index: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
    """Number of each sample's group of equal indices ``(B,)``, and how many of its members count ``(B,)``, at least 1."""
    ordered, order = torch.sort(index, stable=True)
    starts = torch.ones_like(ordered)
    starts[1:] = (ordered[1:] != ordered[:-1]).to(starts.dtype)
    group = torch.empty_like(order).scatter(0, order, starts.cumsum(0) - 1)
    size = torch.zeros_like(index).scatter_add(0, group, valid.to(index.dtype)).gather(0, group)
    return group, size.clamp(min=1).double()
