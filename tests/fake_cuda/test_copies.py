"""Copies of batches go to a stream of their own, in an order in which nothing is read too early or given away too soon."""

from collections.abc import Iterator

import torch

from openclip_ext.copies import on_device, to_device
from tests.fake_cuda.device import CUDA, current_stream, fake_cuda
from tests.fake_cuda.launches import Launches


def _batch() -> dict[str, torch.Tensor]:
    return {"image": torch.empty(2, 3), "text": torch.empty(2, dtype=torch.int64)}


def test_a_batch_is_copied_beside_the_stream_that_computes() -> None:
    with fake_cuda(), Launches() as launches:
        batch = to_device(_batch(), CUDA)
        streams = {launches.writer(tensor) for tensor in batch.values()}
        _ = batch["image"] * 2, batch["text"] * 2
        assert streams.isdisjoint({current_stream(CUDA)}) and len(streams) == 1
    assert not launches.races and not launches.waits


def test_the_next_batch_is_on_its_way_while_one_is_used() -> None:
    taken = []

    def batches() -> Iterator[dict[str, torch.Tensor]]:
        for number in range(3):
            taken.append(number)
            yield _batch()

    with fake_cuda(), Launches() as launches:
        for number, batch in enumerate(on_device(batches(), CUDA)):
            assert taken[-1] == min(number + 1, 2)
            _ = batch["image"].sum()
    assert not launches.races and not launches.waits
