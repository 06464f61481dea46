"""Rehearsal: general pairs fill a share of each batch, some are held out, and resumes are exact."""

import itertools
import json
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count, islice
from pathlib import Path
from typing import Any

import pytest
import torch

from openclip_ext.data.loader.config import KeepConfig, TrainLoaderConfig
from openclip_ext.data.loader.eval_loader import EvalLoader
from openclip_ext.data.loader.rehearsal import RehearsalLoader, build_rehearsal_loader
from openclip_ext.data.loader.train_loader import Interrupted
from openclip_ext.data.sources.spec import DataSpec
from tests.data.loading import assert_equal, by_index, indices, preprocess, tokenize
from tests.data.loading import build as build_alone
from tests.data.shards import undecodable, write_shards

OWN, KEEP = [20, 16], [130, 90]  # samples of the shards
NUM_OWN, NUM_KEEP, HELD_OUT = sum(OWN), sum(KEEP), 100
BATCH, REHEARSED = 8, 2  # a quarter


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    folder = tmp_path_factory.mktemp("data")
    write_shards(folder / "own", OWN)
    write_shards(folder / "keep", KEEP)
    return str(folder / "own" / "*.tar"), str(folder / "keep" / "*.tar")


def build(data: tuple[str, str], share: float = 0.25, spec: Any = None, **options: Any) -> RehearsalLoader:
    defaults = {"batch_size": BATCH, "seed": 7, "rank": 0, "world_size": 1, "shuffle_window": 25}
    loader = build_rehearsal_loader(
        DataSpec(data[0], **spec or {}),
        TrainLoaderConfig(**defaults | options),
        KeepConfig(data[1], share),
        preprocess=preprocess,
        tokenizer=tokenize,
    )
    assert isinstance(loader, RehearsalLoader)
    return loader


def kept(batches: list[dict[str, torch.Tensor]]) -> list[int]:
    """Return the numbers of the rehearsed samples in their data set, in order."""
    return [index - NUM_OWN for index in indices(batches) if index >= NUM_OWN]


def own(batches: list[dict[str, torch.Tensor]]) -> list[int]:
    return [index for index in indices(batches) if index < NUM_OWN]


def held_out(loader: RehearsalLoader) -> set[int]:
    batches = EvalLoader(loader.held_out, preprocess=preprocess, tokenizer=tokenize, batch_size=16)
    found = indices(list(batches))
    assert len(found) == len(set(found)) == HELD_OUT
    return set(found)


@pytest.mark.parametrize(("share", "batch_size", "rehearsed"), [(0.25, 8, 2), (0.5, 6, 3), (0.01, 4, 1), (0.99, 4, 3)])
def test_a_share_of_each_batch_is_rehearsed(data: tuple[str, str], share: float, batch_size: int, rehearsed: int):
    loader = build(data, share, batch_size=batch_size)
    for batch in islice(loader.iterate(0), 3):
        assert len(batch["image"]) == len(batch["text"]) == batch_size
        assert (batch["index"] >= NUM_OWN).tolist() == [False] * (batch_size - rehearsed) + [True] * rehearsed


def test_both_data_sets_have_epochs_of_their_own(data: tuple[str, str]):
    loader = build(data, text_groups=2)
    assert loader.num_samples == NUM_OWN + NUM_KEEP and loader.batches_per_epoch == NUM_OWN // (BATCH - REHEARSED)
    rehearsed = set(range(NUM_KEEP)) - held_out(loader)
    found = []
    for epoch in range(22):
        batches = list(loader.iterate(epoch))
        assert sorted(own(batches)) == list(range(NUM_OWN))
        assert all(len(batch["text_groups"].places) == BATCH for batch in batches)
        found += kept(batches)
    # The 120 rehearsed samples fill 60 batches, and each own epoch has 6 batches.
    for first in (0, 120):
        assert set(found[first : first + 120]) == rehearsed
    assert found[:120] != found[120:240] and set(found[240:]) < rehearsed
    assert held_out(build(data, seed=8)) == held_out(loader), "the held-out samples depend on the seed"
    pixels = by_index(list(build_alone(data[1]).iterate(0)))
    assert all(
        torch.equal(image, pixels[index - NUM_OWN])
        for index, image in by_index(list(build(data).iterate(0))).items()
        if index >= NUM_OWN
    )


def test_ranks_share_both_data_sets(data: tuple[str, str]):
    ranks = [build(data, rank=rank, world_size=2, accum_freq=2, batch_size=4, share=0.25) for rank in (0, 1)]
    batches = [batch for epoch in range(3) for loader in ranks for batch in loader.iterate(epoch)]
    assert len(batches) == 3 * 2 * 6 and len(set(kept(batches))) == len(kept(batches)) == 36
    assert sorted(own(batches)) == sorted(3 * list(range(NUM_OWN)))


@pytest.mark.parametrize(("workers", "places"), [(0, (0, 2, 20, 34, 36, 38, 40, 42)), (2, (2, 40))])
def test_resuming_is_bitwise(data: tuple[str, str], workers: int, places: tuple[int, ...]):
    """An epoch has 36 batches, and one of the rehearsed samples has 40, so it ends in the middle of an epoch."""
    options: dict[str, Any] = {"share": 0.75, "workers": workers, "accum_freq": 2, "batch_size": 4}
    through = build(data, **options)
    epochs = [list(through.iterate(epoch)) for epoch in range(2)]
    for done in places:
        stopped, resumed, again = (build(data, **options) for _ in range(3))
        epoch, place = divmod(done, 36)
        for number in range(epoch):
            list(stopped.iterate(number))
        list(islice(stopped.iterate(epoch), place))
        resumed.load_state_dict(json.loads(json.dumps(stopped.state_dict())))
        again.load_state_dict(resumed.state_dict())
        for loader in (resumed, again):
            assert_equal(list(loader.iterate(epoch)), epochs[epoch][place:])


def test_resuming_on_another_number_of_ranks_uses_the_unseen_samples(data: tuple[str, str]):
    stopped = build(data)
    seen = list(islice(stopped.iterate(0), 2))
    for rank in (0, 1):
        resumed = build(data, rank=rank, world_size=2, batch_size=4)
        resumed.load_state_dict(stopped.state_dict())
        seen += resumed.iterate(0)
    assert sorted(own(seen)) == list(range(NUM_OWN)) and len(set(kept(seen))) == len(kept(seen)) == 12


@pytest.mark.parametrize("waits_before", range(6))
def test_an_interrupted_batch_is_not_counted(data: tuple[str, str], waits_before: int):
    """The signal may come while the loader waits for training data, or for the samples to rehearse."""

    @contextmanager
    def interruptible() -> Iterator[None]:
        if next(waits) == waits_before:
            raise Interrupted
        yield

    waits, loader, resumed = count(), build(data), build(data)
    whole, taken = list(build(data).iterate(0)), []
    with pytest.raises(Interrupted):
        for batch in loader.iterate(0, interruptible):
            taken.append(batch)
    resumed.load_state_dict(loader.state_dict())
    assert_equal([*taken, *resumed.iterate(0)], whole)


def test_bad_samples_of_both_are_skipped(data: tuple[str, str], tmp_path: Path):
    rehearsed = sorted(set(range(NUM_KEEP)) - held_out(build(data)))
    bad_own, bad_kept = 3, rehearsed[10]
    write_shards(tmp_path / "own", OWN, {bad_own: undecodable(bad_own)})
    write_shards(tmp_path / "keep", KEEP, {bad_kept: undecodable(bad_kept)})
    damaged = str(tmp_path / "own" / "*.tar"), str(tmp_path / "keep" / "*.tar")
    loader = build(damaged, spec={"max_bad_fraction": 0.1})
    batches = list(itertools.chain(*(loader.iterate(epoch) for epoch in range(26))))
    assert set(own(batches)) == set(range(NUM_OWN)) - {bad_own}
    assert set(kept(batches)) == set(rehearsed) - {bad_kept}
    assert sum(loader.bad_counts()) == 2


def test_what_does_not_fit_is_refused(data: tuple[str, str], tmp_path: Path):
    write_shards(tmp_path / "few", [150])
    few = data[0], str(tmp_path / "few" / "*.tar")
    for build_wrong, message in (
        (lambda: build(few), "--keep-data.*at least 200 pairs, found 150"),
        (lambda: build(data, batch_size=1), "--keep-data.*--batch-size"),
        (lambda: build(data, 0.9, batch_size=200), "--keep-data: too few samples"),
        (lambda: build(data).load_state_dict(build_alone(data[0]).state_dict()), "made without --keep-data"),
    ):
        with pytest.raises(ValueError, match=message):
            build_wrong()
