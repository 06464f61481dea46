"""Bad samples are replaced and counted. Too many bad samples stop the run."""

import errno
import json
import os
import threading
from pathlib import Path
from typing import BinaryIO

import pytest
import torch
from PIL import Image

from openclip_ext.data.loader.bad_samples import BadSample
from openclip_ext.data.loader.build import build_eval_loader
from openclip_ext.data.loader.train_loader import TrainLoader
from openclip_ext.data.shards import tar
from openclip_ext.data.sources.source import BadDataError
from openclip_ext.data.sources.spec import DataSpec
from tests.data.loading import assert_equal, build, indices, preprocess, tokenize
from tests.data.shards import image_bytes, sample_members, sample_starts, undecodable, write_shards, write_tar

BAD = {
    3: sample_members(3, ["jpg", "json"]),
    17: undecodable(17),
    40: [*sample_members(40, ["jpg"]), ("000040.txt", b"\xff\xfe\xff")],
    55: sample_members(55, ["txt"]),
}


@pytest.fixture
def data(tmp_path: Path) -> str:
    write_shards(tmp_path, [20, 20, 20], BAD)
    return str(tmp_path / "{00000..00002}.tar")


def build_tolerant(data: str, **options) -> TrainLoader:
    return build(data, **{"max_bad_fraction": 0.1} | options)


GOOD = sorted(set(range(60)) - set(BAD))


@pytest.mark.parametrize("workers", [0, 2])
def test_bad_samples_are_replaced_counted_and_remembered(data: str, workers: int, caplog: pytest.LogCaptureFixture):
    """An epoch yields all 56 good samples, and four of them again. Later epochs exclude the bad samples."""
    loader = build_tolerant(data, workers=workers)
    batches = list(loader.iterate(2))
    assert loader.batches_per_epoch == len(batches) == 15 and all(len(batch["index"]) == 4 for batch in batches)
    assert sorted(set(indices(batches))) == GOOD
    counts = {os.path.basename(shard): count for shard, count in loader.bad.by_shard().items()}
    assert counts == {"00000.tar": 2, "00002.tar": 2} and loader.bad.counts() == (4, 0)
    for reason in ("no caption: expected txt, found jpg, json", "the image does not decode", "utf-8", "no image"):
        assert reason in caplog.text
    assert "Epoch 2 found 4 bad samples, which later epochs exclude" in caplog.text
    caplog.clear()
    assert sorted(indices(list(loader.iterate(3)))) == GOOD
    assert loader.bad.counts() == (4, 0) and not caplog.records
    strict = {"manifest": str(Path(data).with_name("manifest.json")), "max_bad_fraction": 0.0}
    with pytest.raises(BadDataError, match="2 of 60 samples"):
        build(data, **strict)
    build(data, **strict, caption_key="json:caption")  # the manifest's counts are of other keys


@pytest.mark.parametrize("kind", ["shards", "csv", "validation"])
def test_the_limit_of_pixels_replaces_pillows(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The images have 576 to 672 pixels. Pillow rejects images of more than twice its limit."""
    data = write_shards(tmp_path, [8])[0]
    if kind == "csv":
        for index in range(8):
            (tmp_path / f"{index}.jpg").write_bytes(image_bytes(index))
        rows = [f"{tmp_path}/{index}.jpg\tsample {index}" for index in range(8)]
        (tmp_path / "rows.csv").write_text("\n".join(["filepath\ttitle", *rows]))
        data = str(tmp_path / "rows.csv")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 250)

    def numbers(limit: int | None) -> list[int]:
        if kind == "validation":
            spec = DataSpec(data, max_image_pixels=limit)
            batches = build_eval_loader(spec, preprocess=preprocess, tokenizer=tokenize, batch_size=4)
        else:
            batches = build(data, max_image_pixels=limit, max_bad_fraction=0.5).iterate(0)
        return sorted({int(text[0]) for batch in batches for text in batch["text"]})

    with pytest.raises(BadDataError, match="DecompressionBombError"):
        numbers(None)
    assert numbers(600) == [0, 1, 5, 6]
    assert numbers(672) == [*range(8)]
    with pytest.raises(BadDataError, match="x 24 pixels, more than --max-image-pixels 500"):
        numbers(500)


@pytest.mark.parametrize("epoch", [0, 1])
@pytest.mark.parametrize(
    "options",
    [{}, {"batch_size": 2, "workers": 2}, {"batch_size": 14, "workers": 3}],
    ids=["one", "two workers", "at most two batches a worker"],
)
def test_resuming_is_bitwise_with_bad_samples(data: str, epoch: int, options: dict[str, int]):
    """Resume after every batch (with workers, every fourth)."""
    first = build_tolerant(data, **options)
    if epoch:
        list(first.iterate(0))
    whole, saves = [], []
    for batch in first.iterate(epoch):
        whole.append(batch)
        saves.append(first.state_dict())
    assert set(indices(whole)) <= set(GOOD) and len(set(indices(whole))) >= 56 - 4
    for done in range(1, len(whole) + 1, 4 if options else 1):
        loader = build_tolerant(data, **options)
        loader.load_state_dict(json.loads(json.dumps(saves[done - 1])))
        assert loader.state_dict() == saves[done - 1]
        assert_equal(list(loader.iterate(epoch)), whole[done:])
        assert loader.bad.counts() == first.bad.counts() and loader.bad.by_shard() == first.bad.by_shard()


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_a_replacement_does_not_depend_on_ranks_or_workers(data: str, workers: int):
    """The rest of an epoch that began with two workers on one rank, on two ranks with other workers."""
    loader = build_tolerant(data, workers=2, batch_size=6)
    batches = loader.iterate(0)
    seen = [next(batches) for _ in range(3)]
    state, rest = loader.state_dict(), list(batches)
    assert set(indices(seen + rest)) == set(GOOD)
    ranks = [build_tolerant(data, workers=workers, world_size=2, rank=rank, batch_size=3) for rank in range(2)]
    for rank, other in enumerate(ranks):
        other.load_state_dict(state)
        own = [{name: batch[name][3 * rank : 3 * rank + 3] for name in batch} for batch in rest]
        assert_equal(list(other.iterate(0)), own)


def test_ranks_that_are_not_connected_share_no_slot(data: str):
    """Each rank knows only its own bad samples. Orders that depend on them would give one sample to two ranks."""
    ranks = [build_tolerant(data, workers=2, world_size=2, rank=rank, batch_size=3) for rank in range(2)]
    for epoch in range(8):
        found = [index for loader in ranks for index in indices(list(loader.iterate(epoch)))]
        assert len(found) == 60 and set(found) == set(GOOD)


def test_replacements_are_spread_over_the_good_samples(tmp_path: Path):
    """A third of a shard is bad, in one run of samples. Few replacements in a batch are equal."""
    write_shards(tmp_path, [400], {number: undecodable(number) for number in range(100, 220)})
    loader = build(f"{tmp_path}/*.tar", batch_size=200, max_bad_fraction=0.4, shuffle_window=50)
    for batch in loader.iterate(0):
        times = torch.bincount(batch["index"])
        assert times.max() <= 6 and (times > 0).sum() >= 110


@pytest.mark.parametrize("workers", [0, 2])
def test_too_many_undecodable_samples_stop_the_run(tmp_path: Path, workers: int):
    write_shards(tmp_path, [20, 20], {number: undecodable(number) for number in range(0, 40, 8)})
    data = str(tmp_path / "*.tar")
    # The pattern begins with ^, because the error text must be the message, and not a worker's traceback.
    message = r"^5 bad samples in this epoch of 40, more than the allowed 10.0% .*00000.tar.*does not decode"
    with pytest.raises(BadDataError, match=message):
        list(build_tolerant(data, workers=workers).iterate(0))
    assert len(list(build_tolerant(data, workers=workers, max_bad_fraction=0.125).iterate(0))) == 40 // 4
    # A limit applies to all samples of an epoch, also to those that the ranks have shared.
    bad = build_tolerant(data, workers=workers, num_samples=20, max_bad_fraction=0.125).bad
    with pytest.raises(BadDataError, match="3 bad samples in this epoch of 20"):
        for number in range(0, 24, 8):
            bad.add(BadSample(number, "damaged", is_read=True))
            bad.exchange()


def test_data_without_a_good_sample_are_an_error(tmp_path: Path):
    (path,) = write_shards(tmp_path, [5], {number: undecodable(number) for number in range(5)})
    with pytest.raises(BadDataError, match="epoch 0 has too few usable samples"):
        list(build(path, max_bad_fraction=1.0).iterate(0))


def test_a_shard_that_is_cut_off_while_it_is_read(tmp_path: Path):
    (path,) = write_shards(tmp_path, [800])
    loader = build(path, shuffle_window=0)
    batches = loader.iterate(0)
    next(batches)
    os.truncate(path, 100 * 512)
    with pytest.raises(BadDataError, match=r"too few usable samples .*00000\.tar.*cannot be read"):
        list(batches)


def test_a_bad_disk_block_costs_one_sample(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (path,) = write_shards(tmp_path, [20])
    read, bad = tar._seek_and_read, sample_starts(path)[7] + tar.BLOCK

    def from_disk(file: BinaryIO, offset: int, length: int) -> bytes:
        if offset == bad:
            raise OSError(errno.EIO, "Input/output error")
        return read(file, offset, length)

    monkeypatch.setattr(tar, "_seek_and_read", from_disk)
    found = indices(list(build(path, batch_size=1, max_bad_fraction=0.5).iterate(0)))
    assert len(found) == 20 and sorted(set(found)) == [*range(7), *range(8, 20)]


def test_lost_samples_count_for_the_start(tmp_path: Path):
    """Samples 10 to 19 are overwritten. They get no index, so only the scan before the run can count them as lost."""
    (path,) = write_shards(tmp_path, [40])
    starts = sample_starts(path)
    with open(path, "r+b") as file:
        file.seek(starts[10])
        file.write(b"x" * (starts[20] - starts[10]))
    with pytest.raises(BadDataError, match=r"1[01] of 30 samples .* are lost or have no .*00000.tar: corrupt"):
        build(path)
    found = indices(list(build(path, max_bad_fraction=0.5).iterate(0)))
    assert len(set(found)) == len(found) == 28


@pytest.mark.parametrize("workers", [0, 2])
def test_a_shard_that_changes_before_it_is_opened(tmp_path: Path, workers: int):
    """If the content changed, no sample is used, because indices may differ. A new modification time alone is accepted."""
    paths = write_shards(tmp_path, [20, 20])
    options = {"workers": workers, "max_bad_fraction": 0.4, "remote_patience": 0}
    loaders = [build(str(tmp_path / "*.tar"), **options) for _ in range(3)]
    size = os.path.getsize(paths[1])
    os.utime(paths[1], ns=(1, 1))
    assert sorted(indices(list(loaders[0].iterate(0)))) == list(range(40))
    members = [member for number in reversed(range(20, 40)) for member in sample_members(number)]
    write_tar(Path(paths[1]), members)
    assert os.path.getsize(paths[1]) == size
    refusal = r"17 bad samples in this epoch of 40.*00001.tar cannot be read"
    with pytest.raises(BadDataError, match=f"{refusal}.*replaced by a file with different samples"):
        list(loaders[1].iterate(0))
    os.truncate(paths[1], size - 512)
    with pytest.raises(
        BadDataError, match=rf"{refusal}.*it has [\d,]+ bytes, but had [\d,]+ when the manifest was made"
    ):
        list(loaders[2].iterate(0))


def test_a_shard_that_is_away_for_a_while_costs_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    paths = write_shards(tmp_path, [20, 20])
    loader = build(str(tmp_path / "*.tar"), remote_patience=20)
    expected = list(loader.iterate(0))
    os.rename(paths[1], f"{paths[1]}.away")
    threading.Timer(1.0, os.rename, (f"{paths[1]}.away", paths[1])).start()
    assert_equal(list(loader.iterate(0)), expected)
    assert "FileNotFoundError" in caplog.text and "continues after" in caplog.text and loader.bad.counts() == (0, 0)


def test_a_shard_that_is_gone_for_an_epoch_is_tried_again(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    """The loader waits for the shard once per epoch, and counts the shard's samples as bad in this epoch only."""
    paths = write_shards(tmp_path, [36, 4])
    loader = build(str(tmp_path / "*.tar"), remote_patience=1, max_bad_fraction=0.1)
    os.rename(paths[1], f"{paths[1]}.away")
    assert sorted(set(indices(list(loader.iterate(0))))) == list(range(36))
    assert "4 that could not be read, which the next epoch retries" in caplog.text and loader.bad.counts() == (4, 0)
    assert len([record for record in caplog.records if "retry in" in record.message]) <= 2
    os.rename(f"{paths[1]}.away", paths[1])
    assert sorted(indices(list(loader.iterate(1)))) == list(range(40))
    assert loader.bad.counts() == (0, 0)


def test_an_error_of_the_transform_is_not_a_bad_sample_and_leaves_the_generators(tmp_path: Path):
    """An exception in the transform is a programming error, so it is raised unchanged. The random state is restored."""

    def broken(image):
        torch.rand(1)
        raise ZeroDivisionError("a mistake")

    loader = build(write_shards(tmp_path, [8]), preprocess=broken)
    before = torch.get_rng_state()
    with pytest.raises(ZeroDivisionError, match="a mistake"):
        list(loader.iterate(0))
    assert torch.equal(torch.get_rng_state(), before)
