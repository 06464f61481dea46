"""The training loader: every sample comes once, pixels do not depend on the layout, and resumes are exact."""

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from openclip_ext.data import order
from openclip_ext.data.shards.shard_source import ShardSource
from tests.data.loading import assert_equal, build, by_index, indices, progress_after, rest_of
from tests.data.shards import write_shards

COUNTS = [30, 17, 0, 41, 12]
N = sum(COUNTS)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let readers compute the order of a few samples at a time, as in an epoch of more than 4,096 samples."""
    monkeypatch.setattr(order, "_READ_BLOCK", 8)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("data")
    write_shards(folder, COUNTS)
    return str(folder / "{00000..00004}.tar")


def test_pixels_depend_on_seed_epoch_and_index_alone(data: str):
    batches = list(build(data).iterate(3))
    for batch in batches:
        assert (batch["image"].shape, batch["image"].dtype) == ((4, 52), torch.float32)
        assert (batch["text"].shape, batch["text"].dtype, batch["index"].dtype) == ((4, 2), torch.int64, torch.int64)
        assert torch.equal(batch["text"][:, 0], batch["index"]), "the caption of sample i must contain i"
    assert sorted(indices(batches)) == list(range(N))
    reference = by_index(batches)
    seen: dict[int, Tensor] = {}
    for rank in range(2):
        seen |= by_index(list(build(data, world_size=2, rank=rank, batch_size=5, workers=1).iterate(3)))
    assert len(seen) == N
    assert all(torch.equal(seen[index], reference[index]) for index in seen)
    for other in (build(data).iterate(4), build(data, seed=8).iterate(3)):
        assert not any(torch.equal(pixels, reference[index]) for index, pixels in by_index(list(other)).items())
    draws = torch.stack(list(reference.values()))[:, -4:]
    assert len(draws.unique(dim=0)) == N


@pytest.mark.parametrize("workers", [0, 2])
def test_resuming_on_the_same_layout_is_bitwise(data: str, workers: int):
    loader = build(data, workers=workers, accum_freq=2)
    whole = list(loader.iterate(1))
    for steps in (0, 1, 7, len(whole) // 2):
        assert_equal(rest_of(loader, 1, steps), whole[2 * steps :])
    # Stop twice in one epoch; a new loader continues after the second stop.
    loader.load_state_dict({"progress": progress_after(loader, 1, 3)})
    batches = loader.iterate(1)
    assert_equal([next(batches) for _ in range(3)], whole[6:9])
    state = json.loads(json.dumps(loader.state_dict()))
    assert state["progress"] == progress_after(loader, 1, 5), "a step of which a batch was yielded is not repeated"
    resumed = build(data, workers=workers, accum_freq=2)
    resumed.load_state_dict(state)
    assert_equal(list(resumed.iterate(1)), whole[10:])
    # An epoch that is not read to its end must not affect the next epoch of persistent workers.
    next(loader.iterate(2))
    assert_equal(list(loader.iterate(1)), whole)


@pytest.mark.parametrize("shuffle_window", [0, 25])
def test_other_ranks_and_workers_go_on_with_the_same_global_batches(data: str, shuffle_window: int):
    """An epoch begins on 2 ranks with 3 workers, and goes on on other numbers of ranks, workers and micro-batches."""
    divisions = [
        {"world_size": 2, "workers": 3, "batch_size": 6},
        {"world_size": 1, "workers": 0, "batch_size": 12},
        {"world_size": 1, "workers": 2, "batch_size": 4, "accum_freq": 3},
        {"world_size": 3, "workers": 1, "batch_size": 2, "accum_freq": 2},
        {"world_size": 4, "workers": 2, "batch_size": 3},
        {"world_size": 6, "workers": 0, "batch_size": 2},
    ]

    def global_batches(division: dict[str, int], progress: dict[str, Any]) -> Tensor:
        """Return the indices ``(steps, 12)`` of the rest of the epoch."""
        ranks = []
        for rank in range(division["world_size"]):
            loader = build(data, rank=rank, shuffle_window=shuffle_window, **division)
            loader.load_state_dict({"progress": progress})
            ranks.append(torch.tensor(indices(list(loader.iterate(5)))).reshape(-1, 12 // division["world_size"]))
        return torch.cat(ranks, dim=1)

    whole = global_batches(divisions[0], {})
    assert len(whole) == N // 12 and len(whole.unique()) == whole.numel()
    first = build(data, rank=0, shuffle_window=shuffle_window, **divisions[0])
    for steps in (1, 5):
        progress = json.loads(json.dumps(progress_after(first, 5, steps)))
        for division in divisions:
            assert torch.equal(global_batches(division, progress), whole[steps:]), division


def test_random_generators_of_training_are_not_touched(data: str):
    def states() -> list[Any]:
        numpy_state = np.random.get_state()
        return [torch.get_rng_state().tolist(), random.getstate(), numpy_state[1].tolist(), numpy_state[2]]

    for workers in (0, 1):
        loader = build(data, workers=workers)
        before = states()
        iterator = loader.iterate(0)
        next(iterator)
        assert states() == before
        torch.rand(1), random.random(), np.random.rand()
        expected = states()
        list(iterator)
        assert states() == expected


@pytest.mark.parametrize("done", [0, 10, 20])
def test_resuming_opens_and_decodes_only_what_is_left(data: str, monkeypatch: pytest.MonkeyPatch, done: int):
    """A resume does not open shards whose samples were all used."""
    loader = build(data, shuffle_window=10)
    expected = indices(list(loader.iterate(0)))
    opened, decoded = [], []
    open_shard, decode = ShardSource.open_shard, ShardSource.decode
    monkeypatch.setattr(ShardSource, "open_shard", lambda self, n: opened.append(n) or open_shard(self, n))
    monkeypatch.setattr(
        ShardSource, "decode", lambda self, raw, *more: decoded.append(raw.index) or decode(self, raw, *more)
    )
    rest = indices(rest_of(loader, 0, done))
    assert rest == decoded == expected[done * 4 :]
    assert set(opened) == {loader.source.shard_number(index) for index in rest}
    if done == 20:
        assert len(set(opened)) < 4, "expected fewer than 4 open shards: the test needs completed shards"


def test_shortened_epochs_see_other_samples_each_time(data: str):
    loader = build(data, num_samples=20)
    assert (loader.num_samples, loader.batches_per_epoch) == (N, 5)
    epochs = [set(indices(list(loader.iterate(epoch)))) for epoch in range(60)]
    assert all(len(epoch) == 20 for epoch in epochs)
    assert set.union(*epochs) == set(range(N))
    assert build(data, num_samples=10**6).batches_per_epoch == N // 4


def test_resampled_shards(data: str, tmp_path: Path):
    loader = build(data, resampled=True, num_samples=400)
    batches = list(loader.iterate(0))
    assert len(batches) == 100, "expected 400 samples, more than the data contain"
    times = np.bincount(indices(batches), minlength=N)
    assert 1 < times.max() < 400 / min(count for count in COUNTS if count)
    assert len(set(times[:29])) <= 2, "only the first and the last shard of an epoch may be incomplete"
    assert_equal(rest_of(loader, 0, 40), batches[40:])
    write_shards(tmp_path, [20, 20])
    two = f"{data}::{tmp_path}/{{00000..00001}}.tar"
    weighted = build(two, resampled=True, upsampling_factors="0::1", num_samples=64)
    assert min(indices(list(weighted.iterate(0)))) >= N


def test_wrong_options_are_refused(data: str):
    for options, message in (
        ({"batch_size": 8, "world_size": 4, "accum_freq": 4}, "the epoch has 100, but one global batch is .* = 128"),
        ({"upsampling_factors": "1::1", "resampled": True}, "2 upsampling factors for 1 data sources"),
        ({"dataset_type": "csv", "resampled": True}, "needs webdataset shards, not csv"),
        ({"upsampling_factors": "1"}, "train_data_upsampling_factors= needs dataset_resampled="),
        ({"dataset_type": "tar"}, "dataset_type='tar': expected one of webdataset, csv"),
        ({"num_samples": 0}, "train_num_samples=0: expected an integer >= 1"),
        ({"batch_size": 0}, "batch_size=0: expected an integer >= 1"),
        ({"rank": -1, "world_size": 2}, "rank=-1: expected an integer >= 0, below world_size=2"),
        ({"rank": 2, "world_size": 2}, "rank=2: expected an integer >= 0, below world_size=2"),
    ):
        with pytest.raises(ValueError, match=message):
            build(data, **options)


def test_what_cannot_be_resumed_is_refused(data: str, tmp_path: Path):
    progress = progress_after(build(data), 0, 5)
    write_shards(tmp_path, [50, 50])
    for path, options, entry, message in (
        (data, {"seed": 8}, {}, "made with seed 7, this run has 8"),
        (str(tmp_path / "*.tar"), {}, {}, "made with data set"),
        (data, {"batch_size": 5}, {}, "made with global batch 4, this run has 5"),
        (data, {}, {"steps": 99}, "cannot resume.* 99 steps.* 25"),
    ):
        with pytest.raises(ValueError, match=message):
            loader = build(path, **options)
            loader.load_state_dict({"progress": progress | entry})
            next(loader.iterate(0))


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_reads_one_epoch_at_a_time(data: str, workers: int):
    """With workers, both iterations would end early, each with samples of the other."""
    loader = build(data, workers=workers)
    first = loader.iterate(0)
    next(first)
    whole = list(loader.iterate(1))
    assert_equal(whole, list(build(data, workers=workers).iterate(1)))
    with pytest.raises(RuntimeError, match="build a second loader"):
        next(first)


def test_a_state_belongs_to_its_epoch(data: str):
    loader = build(data)
    batches = loader.iterate(2)
    next(batches)
    state, rest = loader.state_dict(), [next(batches)]
    loader.load_state_dict(state)
    assert loader.state_dict() == state
    with pytest.raises(RuntimeError, match=r"load_state_dict\(\) was called during"):
        next(batches)
    with pytest.raises(ValueError, match="of epoch 2, not 3"):
        next(loader.iterate(3))
    batches = loader.iterate(2)
    assert_equal([next(batches)], rest)
    assert len([*batches]) == N // 4 - 2
