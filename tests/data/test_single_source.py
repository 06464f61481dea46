"""Batches of one source: each step has samples of one ``::`` component on all ranks, and resumes are exact."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count, islice, pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from openclip_ext.data.loader.single_source import SingleSourceLoader
from openclip_ext.data.loader.train_loader import Interrupted
from openclip_ext.data.sources.source import BadDataError
from tests.data.loading import assert_equal, build, by_index, indices
from tests.data.shards import sample_members, undecodable, write_shards

# Samples 0 to 59 belong to the first source, 60 to 99 to the second.
COUNTS, FIRST = [30, 17, 13, 25, 15], 60


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("data")
    write_shards(folder, COUNTS)
    return f"{folder}/{{00000..00002}}.tar::{folder}/{{00003..00004}}.tar"


def single(data: str, **options: Any) -> SingleSourceLoader:
    loader = build(data, single_source=True, **options)
    assert isinstance(loader, SingleSourceLoader)
    return loader


def sources(batches: list[dict[str, torch.Tensor]]) -> list[int]:
    """Return the source of each batch, and assert that the batch has only one."""
    found = [set((batch["index"] >= FIRST).tolist()) for batch in batches]
    assert all(len(source) == 1 for source in found)
    return [int(*source) for source in found]


def test_each_batch_has_one_source_and_the_usual_pixels(data: str):
    loader = single(data, workers=2)
    batches = list(loader.iterate(0))
    assert len(batches) == loader.batches_per_epoch == 25
    assert sorted(indices(batches)) == list(range(100)) and loader.num_samples == 100
    usual = by_index(list(build(data).iterate(0)))
    assert all(torch.equal(pixels, usual[index]) for index, pixels in by_index(batches).items())
    order = sources(batches)
    assert 5 <= sum(a != b for a, b in pairwise(order)) < 20
    later = sources(list(loader.iterate(1)))
    assert sorted(later) == sorted(order) and later != order
    assert_equal(list(loader.iterate(0)), batches)


def test_all_ranks_and_all_micro_batches_of_a_step_have_the_same_source(data: str):
    ranks = [list(single(data, rank=rank, world_size=2, accum_freq=2, batch_size=3).iterate(2)) for rank in (0, 1)]
    orders = [sources(batches) for batches in ranks]
    assert orders[0] == orders[1] and orders[0][::2] == orders[0][1::2]
    assert len(set(indices(ranks[0] + ranks[1]))) == 60 + 36


@pytest.mark.parametrize("workers", [0, 1])
def test_resuming_is_bitwise(data: str, workers: int):
    loader = single(data, workers=workers, accum_freq=2)
    whole = list(loader.iterate(3))
    for done in range(0, len(whole), 4):
        stopped, resumed, again = (single(data, workers=workers, accum_freq=2) for _ in range(3))
        list(islice(stopped.iterate(3), done))
        resumed.load_state_dict(json.loads(json.dumps(stopped.state_dict())))
        # The state does not change before the next batch, also of sources whose samples are not needed soon.
        again.load_state_dict(resumed.state_dict())
        assert_equal(list(again.iterate(3)), whole[done:])
        steps = resumed.iterate(3)
        assert_equal(list(islice(steps, 2)), whole[done : done + 2])
        again.load_state_dict(resumed.state_dict())
        assert_equal(list(again.iterate(3)), whole[done + 2 :])
    # An epoch that is not read to its end must not affect the state in the next epoch.
    unfinished = loader.iterate(2)
    list(islice(unfinished, 14))
    list(islice(loader.iterate(3), 2))
    again.load_state_dict(state := loader.state_dict())
    assert_equal(list(again.iterate(3)), whole[2:])
    with pytest.raises(RuntimeError, match="build a second loader"):
        list(unfinished)
    loader.load_state_dict(state)
    assert loader.state_dict() == state


def test_bad_samples_are_replaced_from_their_source(tmp_path: Path):
    """Half of a source is bad: its steps have its good samples twice. Later epochs have fewer steps; resumes stay exact."""
    write_shards(tmp_path, COUNTS, {number: undecodable(number) for number in range(FIRST, FIRST + 20)})
    data = f"{tmp_path}/{{00000..00002}}.tar::{tmp_path}/{{00003..00004}}.tar"
    loader = single(data, max_bad_fraction=0.6)
    whole = list(loader.iterate(0))
    assert len(indices(whole)) == 100 and set(indices(whole)) == {*range(60), *range(80, 100)}
    assert len(sources(whole)) == 25 and loader.bad_counts() == (20, 0)
    for done in (3, 12, 18):
        stopped, resumed = (single(data, max_bad_fraction=0.6) for _ in range(2))
        list(islice(stopped.iterate(0), done))
        counts = stopped.bad_counts()[0] + stopped.bad_counts()[1]
        resumed.load_state_dict(stopped.state_dict())
        batches = resumed.iterate(0)
        first = next(batches)
        assert resumed.bad_counts()[0] >= counts, "expected the bad samples of all sources"
        assert_equal([first, *batches], whole[done:])
        assert sorted(indices(list(resumed.iterate(1)))) == [*range(60), *range(80, 100)]


def test_resuming_on_other_ranks_keeps_the_global_batches(data: str):
    stopped = single(data, batch_size=6, workers=2)
    batches = stopped.iterate(0)
    list(islice(batches, 7))
    state, rest = stopped.state_dict(), list(batches)
    for rank in (0, 1):
        loader = single(data, rank=rank, world_size=2, batch_size=3)
        loader.load_state_dict(state)
        assert_equal(list(loader.iterate(0)), [{name: batch[name][3 * rank :][:3] for name in batch} for batch in rest])


def test_samples_are_divided_by_the_factors(data: str):
    loader = single(data, resampled=True, upsampling_factors="1::3", num_samples=400)
    order = sources(list(loader.iterate(0)))
    # 60 samples have factor 1 and 40 have factor 3: 40·3 / (60 + 40·3) = 2/3 of the drawn samples are from the second.
    assert order.count(1) == 66 and order.count(0) == 33
    assert set(sources(list(single(data, resampled=True, upsampling_factors="0::1", num_samples=64).iterate(0)))) == {1}


def test_no_sample_is_lost_by_rounding(tmp_path: Path):
    write_shards(tmp_path, [64, 34])
    data = f"{tmp_path}/00000.tar::{tmp_path}/00001.tar"
    assert single(data, batch_size=32).batches_per_epoch == 3
    assert len(list(single(data, batch_size=2).iterate(0))) == 49


def test_known_bad_samples_are_refused_for_each_source(tmp_path: Path):
    """Three of 40 samples of a source have no image: too many for it, but not for all 100 samples."""
    lacking = {number: sample_members(number, ["txt"]) for number in (FIRST, FIRST + 5, FIRST + 30)}
    write_shards(tmp_path, COUNTS, lacking)
    data = f"{tmp_path}/{{00000..00002}}.tar::{tmp_path}/{{00003..00004}}.tar"
    assert build(data).source.known_bad()[0] == 3
    with pytest.raises(BadDataError, match=r"3 of 40 samples .*00003\.tar: 2 samples .*00004\.tar: 1 "):
        single(data)


def test_what_does_not_fit_is_refused(data: str):
    mixed, alone = build(data), single(data)
    next(mixed.iterate(0)), next(alone.iterate(0))
    with pytest.raises(ValueError, match="made without --single-source-batches"):
        single(data).load_state_dict(mixed.state_dict())
    with pytest.raises(ValueError, match="made with data set"):
        build(data).load_state_dict(alone.state_dict())
    for shards, options, message in (
        (data.split("::")[0], {}, "expected several sources in --train-data, joined by '::', found 1"),
        (data, {"batch_size": 50}, "source .*00003.tar: too few samples: the epoch has 40"),
        ("x.csv", {"dataset_type": "csv"}, "needs webdataset shards, not csv"),
    ):
        with pytest.raises(ValueError, match=message):
            single(shards, **options)


@pytest.mark.parametrize("done", [0, 12])
def test_a_step_without_a_batch_does_not_count(data: str, done: int):
    """A wait for a batch may be interrupted. Before the first batch of an epoch, a resume may have other data."""

    @contextmanager
    def interruptible() -> Iterator[None]:
        if next(waits) == done:
            raise Interrupted
        yield

    waits, loader, resumed = count(), single(data), single(data)
    whole = list(loader.iterate(0))
    with pytest.raises(Interrupted):
        list(loader.iterate(0, interruptible))
    resumed.load_state_dict(loader.state_dict())
    assert_equal(list(resumed.iterate(0)), whole[done:])
    assert bool(loader.state_dict()["progress"]) == bool(done)
