"""What every training loader promises, whatever its source: each sample once, pixels by index, exact resumes, any ranks.

The images and captions of all formats are equal, so the batches of one format are those of the others.
"""

import json
import random
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count, islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from openclip_ext.data import order
from openclip_ext.data.loader.config import KeepConfig
from openclip_ext.data.loader.eval_loader import EvalLoader
from openclip_ext.data.loader.train_loader import Interrupted
from openclip_ext.data.manifest.manifest import Manifest
from openclip_ext.data.shards.shard_source import ShardSource
from openclip_ext.data.sources.source import BadDataError
from tests.data.loading import assert_equal, build, by_index, indices, preprocess, tokenize
from tests.data.shards import image_bytes, sample_members, undecodable, write_csv, write_shards

COUNTS, FIRST = [30, 17, 13, 0, 25, 15], 60  # samples 0 to 59 belong to the first source of --single-source-batches
N = sum(COUNTS)
BAD = (3, 17, *range(62, 70))
# Samples at both ends, consecutive samples, samples on both sides of a shard boundary, and all samples of the last shard.
EXCLUDED = (0, 1, 2, 29, 30, *range(85, 100))
KEEP, HELD_OUT = [130, 90], 100
TWO = "{0}/{{00000..00002}}.tar::{0}/{{00003..00005}}.tar"
# Data set -> the path of its data in the folder, and the options of its loader.
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "shards": ("own/*.tar", {}),
    "no shuffle": ("own/*.tar", {"shuffle_window": 0}),
    "csv": ("data.csv", {}),
    "parquet": ("pairs.parquet", {}),
    "bad samples": ("bad/*.tar", {"max_bad_fraction": 0.3}),
    "excluded samples": ("own/*.tar", {"manifest": "fewer.json"}),
    "single source": (TWO.format("own"), {"single_source": True}),
    "bad samples of a source": (TWO.format("bad"), {"single_source": True, "max_bad_fraction": 0.3}),
    "resampled": ("own/*.tar", {"resampled": True, "num_samples": 96}),
    "rehearsal": ("own/*.tar", {"keep": KeepConfig("keep/*.tar", 0.5)}),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    shards = write_shards(folder / "own", COUNTS)
    write_shards(folder / "bad", COUNTS, {number: undecodable(number) for number in BAD})
    write_shards(folder / "keep", KEEP)
    Manifest.scan(shards).without(EXCLUDED).save(folder / "fewer.json")
    write_csv(folder, N)
    return folder


def write_parquet() -> None:
    """Write the samples as a table in the working directory, unless it exists. Skip the test without ``datasets``."""
    table = pytest.importorskip("datasets").Dataset
    if not Path("pairs.parquet").exists():
        images = [{"bytes": image_bytes(number), "path": None} for number in range(N)]
        captions = [f"sample {number}" for number in range(N)]
        table.from_dict({"image": images, "caption": captions}).to_parquet("pairs.parquet")


@pytest.fixture(autouse=True)
def small_blocks(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let readers compute the order of a few samples at a time, as in an epoch of more than 4,096 samples."""
    monkeypatch.setattr(order, "_READ_BLOCK", 8)
    monkeypatch.chdir(folder)


def make(kind: str, **options: Any) -> Any:
    data, own = KINDS[kind]
    if kind == "parquet":
        write_parquet()
    return build(data, **own | options)


def stored(loader: Any) -> dict[str, Any]:
    return json.loads(json.dumps(loader.state_dict()))


def resumed(state: dict[str, Any], kind: str, **options: Any) -> Any:
    loader = make(kind, **options)
    loader.load_state_dict(state)
    return loader


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in ("resampled", "rehearsal")])
def test_an_epoch_has_each_sample_once_with_the_pixels_of_seed_epoch_and_index(kind: str):
    expected = by_index(list(make("shards").iterate(3)))
    draws = torch.stack(list(expected.values()))[:, -4:]
    assert len(draws.unique(dim=0)) == N
    batches = list(make(kind, batch_size=2, workers=2 if kind == "single source" else 0).iterate(3))
    excluded = {"excluded samples": EXCLUDED}.get(kind, BAD if kind.startswith("bad") else ())
    assert set(indices(batches)) == set(range(N)) - {*excluded}
    assert len(indices(batches)) == (N - len(EXCLUDED) if kind == "excluded samples" else N)
    assert all(torch.equal(pixels, expected[index]) for index, pixels in by_index(batches).items())
    for batch in batches:
        assert (batch["image"].shape, batch["image"].dtype) == ((2, 52), torch.float32)
        assert (batch["text"].shape, batch["text"].dtype, batch["index"].dtype) == ((2, 2), torch.int64, torch.int64)
        assert torch.equal(batch["text"][:, 0], batch["index"]), "the caption of sample i must contain i"
    for other in (make(kind).iterate(4), make(kind, seed=8).iterate(3)):
        assert not any(torch.equal(pixels, expected[index]) for index, pixels in by_index(list(other)).items())


@pytest.mark.parametrize(
    ("kind", "workers"),
    [*((kind, 0) for kind in KINDS), ("bad samples", 2), ("single source", 1), ("rehearsal", 1)],
)
def test_resuming_is_bitwise(kind: str, workers: int):
    """Stop at several steps of two epochs, and once more after another step. Bad samples are found in the first epoch."""
    options = {"workers": workers, "accum_freq": 2}
    loader = make(kind, **options)
    for epoch in (0, 1):
        batches, states = [], []
        for batch in loader.iterate(epoch):
            batches.append(batch)
            states.append(stored(loader))
        counts = loader.bad_counts()
        for done in (20,) if workers else (1, 2, 11, 16):
            once = resumed(states[done - 1], kind, **options)
            assert stored(once) == states[done - 1]
            rest = once.iterate(epoch)
            found = [*islice(rest, 2)]
            twice = resumed(stored(once), kind, **options)
            found += twice.iterate(epoch)
            # A step of which a batch was yielded is not repeated.
            assert_equal(found, batches[done + done % 2 :])
            assert twice.bad_counts() == counts


DIVISIONS: list[dict[str, int]] = [
    {"world_size": 2, "workers": 2, "batch_size": 6},
    {"world_size": 1, "workers": 0, "batch_size": 12},
    {"world_size": 1, "workers": 3, "batch_size": 4, "accum_freq": 3},
    {"world_size": 3, "workers": 0, "batch_size": 2, "accum_freq": 2},
    {"world_size": 4, "workers": 0, "batch_size": 3},
    {"world_size": 6, "workers": 0, "batch_size": 2},
]


def global_batches(kind: str, state: dict[str, Any], division: dict[str, int]) -> tuple[Tensor, Tensor]:
    """Return the indices ``(steps, 12)`` and pixels ``(steps, 12, 52)`` of the rest of an epoch."""
    ranks = []
    for rank in range(division["world_size"]):
        loader = resumed(state, kind, rank=rank, **division) if state else make(kind, rank=rank, **division)
        batches, own = list(loader.iterate(5)), 12 // division["world_size"]
        ranks.append([torch.cat([batch[name] for batch in batches]) for name in ("index", "image")])
        ranks[-1] = [ranks[-1][0].reshape(-1, own), ranks[-1][1].reshape(-1, own, 52)]
    index, image = (torch.cat(parts, dim=1) for parts in zip(*ranks, strict=True))
    return index, image


@pytest.mark.parametrize("kind", ["shards", "no shuffle", "csv", "bad samples", "single source"])
def test_other_ranks_and_workers_go_on_with_the_same_global_batches(kind: str):
    """An epoch begins on 2 ranks with 2 workers, and goes on on other numbers of ranks, workers and micro-batches."""
    index, image = global_batches(kind, {}, DIVISIONS[0])
    assert len(index) == N // 12
    assert len(index.unique()) == index.numel() or kind == "bad samples"
    first = make(kind, rank=0, **DIVISIONS[0])
    list(islice(first.iterate(5), 3))
    for division in DIVISIONS:
        found = global_batches(kind, stored(first), division)
        assert torch.equal(found[0], index[3:]) and torch.equal(found[1], image[3:]), division


@pytest.mark.parametrize("waits_before", [0, 1, 2, 5])
@pytest.mark.parametrize("kind", ["shards", "single source", "rehearsal"])
def test_an_interrupted_step_is_not_counted(kind: str, waits_before: int):
    """A signal may come while the loader waits for training data, or for the samples to rehearse."""

    @contextmanager
    def interruptible() -> Iterator[None]:
        if next(waits) == waits_before:
            raise Interrupted
        yield

    waits, loader, taken = count(), make(kind), []
    with pytest.raises(Interrupted):
        for batch in loader.iterate(0, interruptible):
            taken.append(batch)
    assert_equal([*taken, *resumed(stored(loader), kind).iterate(0)], list(make(kind).iterate(0)))
    if not taken and kind != "rehearsal":
        resumed(stored(loader), kind, seed=8)  # before the first step, a resume may have other data


@pytest.mark.parametrize(("kind", "workers"), [("shards", 0), ("shards", 2), ("single source", 0)])
def test_a_loader_reads_one_epoch_at_a_time(kind: str, workers: int):
    """An epoch that is not read to its end does not affect the next one, and can no longer be read."""
    loader = make(kind, workers=workers)
    first = loader.iterate(0)
    list(islice(first, 14))
    assert_equal(list(loader.iterate(1)), list(make(kind, workers=workers).iterate(1)))
    with pytest.raises(RuntimeError, match="build a second loader"):
        list(first)


def test_a_state_belongs_to_its_epoch():
    loader = make("shards")
    batches = loader.iterate(2)
    next(batches)
    loader.load_state_dict(loader.state_dict())
    with pytest.raises(RuntimeError, match=r"load_state_dict\(\) was called during"):
        next(batches)
    with pytest.raises(ValueError, match="of epoch 2, not 3"):
        next(loader.iterate(3))
    assert len([*loader.iterate(2)]) == N // 4 - 1


def test_random_generators_of_training_are_not_touched():
    def states() -> list[Any]:
        numpy_state = np.random.get_state()
        return [torch.get_rng_state().tolist(), random.getstate(), numpy_state[1].tolist(), numpy_state[2]]

    for workers in (0, 1):
        before, batches = states(), make("shards", workers=workers).iterate(0)
        next(batches)
        assert states() == before
        torch.rand(1), random.random(), np.random.rand()
        expected = states()
        list(batches)
        assert states() == expected


def test_resuming_opens_and_decodes_only_what_is_left(monkeypatch: pytest.MonkeyPatch):
    """A resume does not open shards whose samples were all used."""
    loader = make("shards", shuffle_window=10)
    batches = loader.iterate(0)
    list(islice(batches, 20))
    state, expected = stored(loader), indices(list(batches))
    opened, decoded = [], []
    open_shard, decode = ShardSource.open_shard, ShardSource.decode
    monkeypatch.setattr(ShardSource, "open_shard", lambda self, n: opened.append(n) or open_shard(self, n))
    monkeypatch.setattr(
        ShardSource, "decode", lambda self, raw, *more: decoded.append(raw.index) or decode(self, raw, *more)
    )
    assert indices(list(resumed(state, "shards", shuffle_window=10).iterate(0))) == decoded == expected
    assert set(opened) == {loader.source.shard_number(index) for index in expected} and len(set(opened)) < 4


def test_shortened_and_resampled_epochs(folder: Path):
    loader = make("shards", num_samples=20)
    assert (loader.num_samples, loader.batches_per_epoch) == (N, 5)
    epochs = [set(indices(list(loader.iterate(epoch)))) for epoch in range(40)]
    assert all(len(epoch) == 20 for epoch in epochs) and set.union(*epochs) == set(range(N))
    assert make("shards", num_samples=10**6).batches_per_epoch == N // 4
    times = np.bincount(indices(list(make("resampled", num_samples=400).iterate(0))), minlength=N)
    assert times.sum() == 400 and 1 < times.max() < 400 / 13
    assert len(set(times[:29])) <= 2, "only the first and the last shard of an epoch may be incomplete"
    factors = {"resampled": True, "upsampling_factors": "0::1", "num_samples": 64}
    assert min(indices(list(build(TWO.format("own"), **factors).iterate(0)))) >= FIRST


OWN = KINDS["shards"][0]


@pytest.mark.parametrize(
    ("data", "options", "message"),
    [
        (
            OWN,
            {"batch_size": 8, "world_size": 4, "accum_freq": 4},
            "the epoch has 100, but a global batch needs 128",
        ),
        (OWN, {"upsampling_factors": "1::1", "resampled": True}, "2 upsampling factors for 1 data sources"),
        (OWN, {"dataset_type": "csv", "resampled": True}, "needs webdataset shards, not csv"),
        (OWN, {"upsampling_factors": "1"}, "train_data_upsampling_factors= needs dataset_resampled="),
        (OWN, {"dataset_type": "tar"}, "dataset_type='tar': expected one of webdataset, csv"),
        (OWN, {"num_samples": 0}, "train_num_samples=0"),
        (OWN, {"batch_size": 0}, "batch_size=0"),
        (OWN, {"rank": -1, "world_size": 2}, "rank=-1"),
        (OWN, {"rank": 2, "world_size": 2}, "rank=2"),
        (OWN, {"single_source": True}, "expected several sources in --train-data"),
        (TWO.format("own"), {"single_source": True, "batch_size": 50}, "source .*00003.tar: too few samples"),
        ("data.csv", {"single_source": True}, "needs webdataset shards, not csv"),
        (OWN, {"keep": KeepConfig(OWN)}, "--keep-data.*at least 200 pairs, found 100"),
        (OWN, {"keep": KeepConfig("keep/*.tar"), "batch_size": 1}, "--keep-data.*--batch-size"),
        (OWN, {"keep": KeepConfig("keep/*.tar", 0.9), "batch_size": 200}, "--keep-data: too few samples"),
        (OWN, {"keep": KeepConfig("keep/*.tar"), "batch_size": 200}, "needs 150 of them .150 per micro-batch"),
    ],
)
def test_wrong_options_are_refused(data: str, options: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        build(data, **options)


@pytest.mark.parametrize(
    ("before", "after", "options", "message"),
    [
        ("shards", "shards", {"seed": 8}, "made with seed 7, this run has 8"),
        ("shards", "csv", {}, "made with data set"),
        ("shards", "shards", {"batch_size": 5}, "made with global batch 4, this run has 5"),
        ("shards", "single source", {}, "made without --single-source-batches"),
        ("single source", "shards", {}, "made with data set"),
        ("shards", "rehearsal", {}, "made without --keep-data"),
    ],
)
def test_what_cannot_be_resumed_is_refused(before: str, after: str, options: dict[str, int], message: str):
    loader = make(before)
    next(loader.iterate(0))
    with pytest.raises(ValueError, match=message):
        resumed(stored(loader), after, **options)


def test_a_state_with_more_steps_than_the_epoch_is_refused():
    loader = make("shards")
    next(loader.iterate(0))
    state = stored(loader)
    state["progress"]["steps"] = 99
    with pytest.raises(ValueError, match=r"cannot resume.* 99 steps.* 25"):
        next(resumed(state, "shards").iterate(0))


# ------------------------------------------------------------------ batches of one source


def sources(batches: list[dict[str, Tensor]]) -> list[int]:
    """Return the source of each batch, and assert that the batch has only one."""
    found = [set((batch["index"] >= FIRST).tolist()) for batch in batches]
    assert all(len(source) == 1 for source in found)
    return [int(*source) for source in found]


def test_each_batch_has_one_source_and_the_sources_change():
    loader = make("single source")
    orders = [sources(list(loader.iterate(epoch))) for epoch in (0, 1)]
    assert len(orders[0]) == loader.batches_per_epoch == 25 and loader.num_samples == N
    assert sorted(orders[0]) == sorted(orders[1]) and orders[0] != orders[1]
    assert 5 <= sum(a != b for a, b in pairwise(orders[0])) < 20
    assert len(sources(list(make("bad samples of a source").iterate(0)))) == 25


def test_all_ranks_and_all_micro_batches_of_a_step_have_the_same_source():
    options = {"world_size": 2, "accum_freq": 2, "batch_size": 3}
    ranks = [list(make("single source", rank=rank, **options).iterate(2)) for rank in (0, 1)]
    orders = [sources(batches) for batches in ranks]
    assert orders[0] == orders[1] and orders[0][::2] == orders[0][1::2]
    assert len(set(indices(ranks[0] + ranks[1]))) == 60 + 36


def test_samples_are_divided_by_the_factors_and_none_is_lost_by_rounding(tmp_path: Path):
    # 60 samples have factor 1 and 40 have factor 3: 40·3 / (60 + 40·3) = 2/3 of the drawn samples are from the second.
    drawn = {"resampled": True, "upsampling_factors": "1::3", "num_samples": 400}
    order = sources(list(make("single source", **drawn).iterate(0)))
    assert order.count(1) == 66 and order.count(0) == 33
    drawn |= {"upsampling_factors": "0::1", "num_samples": 64}
    assert set(sources(list(make("single source", **drawn).iterate(0)))) == {1}
    data = "::".join(write_shards(tmp_path, [64, 34]))
    assert build(data, single_source=True, batch_size=32).batches_per_epoch == 3
    assert len(list(build(data, single_source=True, batch_size=2).iterate(0))) == 49


def test_known_bad_samples_are_refused_for_each_source(tmp_path: Path):
    """Three of 40 samples of a source have no image: too many for it, but not for all 100 samples."""
    lacking = {number: sample_members(number, ["txt"]) for number in (FIRST, FIRST + 5, FIRST + 30)}
    write_shards(tmp_path, COUNTS, lacking)
    data = TWO.format(tmp_path)
    assert build(data).source.known_bad()[0] == 3
    with pytest.raises(BadDataError, match=r"3 of 40 samples .*00004\.tar: 2 samples .*00005\.tar: 1 "):
        build(data, single_source=True)


# ------------------------------------------------------------------ rehearsal


def kept(batches: list[dict[str, Tensor]]) -> list[int]:
    """Return the numbers of the rehearsed samples in their data set, in order."""
    return [index - N for index in indices(batches) if index >= N]


def own(batches: list[dict[str, Tensor]]) -> list[int]:
    return [index for index in indices(batches) if index < N]


def held_out(loader: Any) -> set[int]:
    batches = EvalLoader(loader.held_out, preprocess=preprocess, tokenizer=tokenize, batch_size=16)
    found = indices(list(batches))
    assert len(found) == len(set(found)) == HELD_OUT
    return set(found)


@pytest.mark.parametrize(("share", "batch_size", "rehearsed"), [(0.25, 8, 2), (0.5, 6, 3), (0.01, 4, 1), (0.99, 4, 3)])
def test_a_share_of_each_batch_is_rehearsed(share: float, batch_size: int, rehearsed: int):
    loader = make("rehearsal", keep=KeepConfig("keep/*.tar", share), batch_size=batch_size)
    for batch in islice(loader.iterate(0), 3):
        assert len(batch["image"]) == len(batch["text"]) == batch_size
        assert (batch["index"] >= N).tolist() == [False] * (batch_size - rehearsed) + [True] * rehearsed


def test_both_data_sets_have_epochs_of_their_own():
    """An epoch of the training data has 50 batches. The 120 rehearsed samples fill 60 batches."""
    loader = make("rehearsal", text_groups=2)
    assert (loader.num_samples, loader.batches_per_epoch) == (N + sum(KEEP), 50)
    rehearsed, found = set(range(sum(KEEP))) - held_out(loader), []
    for epoch in range(3):
        batches = list(loader.iterate(epoch))
        assert sorted(own(batches)) == list(range(N))
        assert all(len(batch["text_groups"].places) == 4 for batch in batches)
        found += kept(batches)
    assert set(found[:120]) == set(found[120:240]) == rehearsed > set(found[240:])
    assert found[:120] != found[120:240]
    assert held_out(make("rehearsal", seed=8)) == held_out(loader), "the held-out samples depend on the seed"
    pixels = by_index(list(build("keep/*.tar").iterate(0)))
    batches = by_index(list(make("rehearsal").iterate(0)))
    assert all(torch.equal(image, pixels[index - N]) for index, image in batches.items() if index >= N)


def test_ranks_share_both_data_sets_and_a_resume_uses_the_unseen_samples():
    share = {"keep": KeepConfig("keep/*.tar", 0.2)}
    ranks = [make("rehearsal", rank=rank, world_size=2, accum_freq=2, batch_size=6, **share) for rank in (0, 1)]
    batches = [batch for epoch in range(3) for loader in ranks for batch in loader.iterate(epoch)]
    assert len(batches) == len(set(kept(batches))) == len(kept(batches)) == 60
    assert sorted(own(batches)) == sorted(3 * list(range(N)))
    stopped = make("rehearsal", batch_size=10, **share)
    seen = list(islice(stopped.iterate(0), 2))
    for rank in (0, 1):
        seen += resumed(stored(stopped), "rehearsal", rank=rank, world_size=2, batch_size=5, **share).iterate(0)
    assert len(set(own(seen))) == len(own(seen)) == N // 8 * 8
    assert len(set(kept(seen))) == len(kept(seen)) == N // 8 * 2


def test_bad_samples_of_both_are_replaced(tmp_path: Path):
    rehearsed = sorted(set(range(sum(KEEP))) - held_out(make("rehearsal")))
    write_shards(tmp_path, KEEP, {rehearsed[10]: undecodable(rehearsed[10])})
    loader = build("bad/*.tar", keep=KeepConfig(f"{tmp_path}/*.tar", 0.5), max_bad_fraction=0.3)
    batches = [batch for epoch in range(4) for batch in loader.iterate(epoch)]
    assert set(own(batches)) == set(range(N)) - {*BAD}
    assert set(kept(batches)) == {*rehearsed} - {rehearsed[10]}
    assert sum(loader.bad_counts()) == len(BAD) + 1
