"""Every loss on four ranks of fake CUDA tensors: collectives are stubs, so only devices, waits and their number are seen."""

from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from openclip_ext import distributed
from tests.fake_cuda.device import fake_cuda, to_fake_cuda
from tests.fake_cuda.launches import Launches
from tests.fake_cuda.test_losses import ALL, CALLS, call
from tests.losses.cases import CASES, kinds

RANKS = 4
# OpenCLIP's own losses gather by themselves.
_NAMES = [*(name for name in kinds() if CASES[name].loss != "openclip"), "fastclip-host"]


@contextmanager
def four_ranks() -> Iterator[Counter[str]]:
    """This process is rank 1 of four; count the collectives by their name and the device of their tensor."""
    seen: Counter[str] = Counter()

    def stub(name: str) -> Any:
        def collective(tensor: torch.Tensor, *args: Any, group: Any = None, **options: Any) -> None:
            seen[f"{name} on {tensor.device.type}"] += 1
            assert (tensor.device.type == "cpu") == (group == "gloo"), "gloo is for the host, NCCL for the device"

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
        loss = ALL[name].create()
        with fake_cuda(), Launches() as launches:
            to_fake_cuda(loss)
            launches.reset()
            for number in range(CALLS):
                loss.start_epoch(number // 2)
                collectives.clear()
                call(loss)
    assert launches.unknown_waits == {}
    assert sum(collectives.values()) <= 12
    assert bool(collectives["all_gather_into_tensor on cpu"]) == name.endswith("-host")
