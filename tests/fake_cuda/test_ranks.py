"""Every loss on one of four ranks with fake CUDA tensors.

Collectives are stubs that count their calls and record the devices of their tensors.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from openclip_ext import distributed
from tests.fake_cuda.test_losses import ALL, CALLS, GATHER_BY_THEMSELVES, run_calls
from tests.losses.cases import kinds

RANKS = 4
_NAMES = [name for name in kinds() if name not in GATHER_BY_THEMSELVES]


@contextmanager
def four_ranks() -> Iterator[list[Counter[str]]]:
    """Make this process rank 1 of four. Yield a list. Its last counter counts collectives by name and tensor device."""
    seen: list[Counter[str]] = []

    def stub(name: str) -> Any:
        def collective(tensor: torch.Tensor, *args: Any, group: Any = None, **options: Any) -> None:
            seen[-1][f"{name} on {tensor.device.type}"] += 1
            assert (tensor.device.type == "cpu") == (group == "gloo"), "expected gloo for the CPU, NCCL for CUDA"

        return collective

    with ExitStack() as stack:
        for name, value in {"world_size": RANKS, "rank": 1, "is_initialized": True, "_control_group": "gloo"}.items():
            stack.enter_context(mock.patch.object(distributed, name, lambda value=value: value))
        for name in ("all_gather_into_tensor", "all_reduce"):
            stack.enter_context(mock.patch.object(dist, name, stub(name)))
        yield seen


@pytest.mark.parametrize("name", _NAMES)
def test_no_rank_waits_for_its_device(name: str) -> None:
    with four_ranks() as collectives:
        run_calls(ALL[name].create(), before_call=lambda: collectives.append(Counter()))
    last_in_training = collectives[CALLS - 1]
    assert sum(last_in_training.values()) <= 12
    assert not last_in_training["all_gather_into_tensor on cpu"]
