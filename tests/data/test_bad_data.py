"""Bad samples are replaced and counted. Too many bad samples stop the run."""

import errno
import os
import threading
from pathlib import Path
from typing import Any, BinaryIO

import pytest
import torch
from PIL import Image

from openclip_ext.data.loader.bad_samples import BadSample
from openclip_ext.data.loader.build import build_eval_loader, build_source
from openclip_ext.data.loader.eval_loader import EvalLoader
from openclip_ext.data.loader.train_loader import TrainLoader
from openclip_ext.data.shards import tar
from openclip_ext.data.sources.source import BadDataError
from openclip_ext.data.sources.spec import DataSpec
from tests.data.loading import assert_equal, build, indices, preprocess, tokenize
from tests.data.shards import (
    image_bytes,
    sample_members,
    sample_starts,
    undecodable,
    write_csv,
    write_shards,
    write_tar,
)

BAD = {
    3: sample_members(3, ["jpg", "json"]),
    17: undecodable(17),
    40: [*sample_members(40, ["jpg"]), ("000040.txt", b"\xff\xfe\xff")],
    55: sample_members(55, ["txt"]),
}
GOOD = sorted(set(range(60)) - set(BAD))


@pytest.fixture
def data(tmp_path: Path) -> str:
    write_shards(tmp_path, [20, 20, 20], BAD)
    return str(tmp_path / "{00000..00002}.tar")


def build_tolerant(data: str, **options) -> TrainLoader:
    return build(data, **{"max_bad_fraction": 0.1} | options)


def bad_shards(folder: Path) -> str:
    return f"{write_shards(folder, [20, 20, 20], BAD)[0][:-5]}[0-2].tar"


def bad_rows_of_csv(folder: Path) -> str:
    path = write_csv(folder)
    (folder / "6.jpg").unlink()
    os.mkfifo(folder / "6.jpg")
    (folder / "7.jpg").unlink()
    (folder / "8.jpg").write_bytes(b"no image")
    path.write_text(path.read_text().replace("\tsample 9\n", "\t \n").replace("10.jpg", "\0.jpg"))
    return str(path)


def bad_rows_of_parquet(folder: Path) -> str:
    images = [{"bytes": image_bytes(number), "path": None} for number in range(30)]
    images[4], images[5] = {"bytes": None, "path": "gone.png"}, {"bytes": b"no image", "path": None}
    captions = [" " if number == 6 else f"sample {number}" for number in range(30)]
    rows = pytest.importorskip("datasets").Dataset.from_dict({"image": images, "caption": captions})
    rows.to_parquet(folder / "pairs.parquet")
    return str(folder / "pairs.parquet")


# Data set -> how to write it, its number of samples, the bad ones, and what the log reports.
FAULTS: dict[str, tuple[Any, int, set[int], tuple[str, ...]]] = {
    "shards": (
        bad_shards, 60, {*BAD},
        ("no caption: expected txt, found jpg, json", "the image does not decode", "utf-8", "no image"),
    ),
    "csv": (bad_rows_of_csv, 30, {*range(6, 11)}, ("row 9 has no caption", "7.jpg cannot be read", "does not decode")),
    "parquet": (bad_rows_of_parquet, 30, {4, 5, 6}, ("row 6 has no caption", "gone.png cannot be read", "does not decode")),
}  # fmt: skip


@pytest.mark.parametrize(("fault", "workers"), [*((fault, 0) for fault in FAULTS), ("shards", 2)])
def test_bad_samples_are_replaced_counted_and_excluded_later(
    fault: str, workers: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    """An epoch yields all good samples, and some of them again. Later epochs exclude the bad samples."""
    write, samples, bad, reasons = FAULTS[fault]
    data, good = write(tmp_path), sorted(set(range(samples)) - FAULTS[fault][2])
    loader = build(data, batch_size=1, workers=workers, max_bad_fraction=0.2)
    found = indices(list(loader.iterate(2)))
    assert len(found) == loader.num_samples == samples and sorted(set(found)) == good
    assert all(reason in caplog.text for reason in reasons)
    assert f"Epoch 2 found {len(bad)} bad samples, which later epochs exclude" in caplog.text
    caplog.clear()
    assert sorted(indices(list(loader.iterate(3)))) == good
    assert loader.bad.counts() == (len(bad), 0) and sum(loader.bad.by_shard().values()) == len(bad)
    assert not caplog.records
    evaluated = EvalLoader(build_source(DataSpec(data)), preprocess=preprocess, tokenizer=tokenize, batch_size=8)
    batches = list(evaluated)
    assert indices(batches) == good
    assert all(torch.equal(batch["text"][:, 0], batch["index"]) for batch in batches)


def test_samples_that_are_known_to_be_bad_are_refused_at_the_start(data: str, tmp_path: Path):
    build(data)  # makes the manifest
    strict = {"manifest": str(tmp_path / "manifest.json"), "max_bad_fraction": 0.0}
    with pytest.raises(BadDataError, match="2 of 60 samples"):
        build(data, **strict)
    build(data, **strict, caption_key="json:caption")  # the manifest's counts are of other keys
    with pytest.raises(BadDataError, match=r"1 of 30 samples .*data.csv, for example rows \[9\]"):
        build(bad_rows_of_csv(tmp_path), max_bad_fraction=0.01)


@pytest.mark.parametrize("kind", ["shards", "csv", "validation"])
def test_the_limit_of_pixels_replaces_pillows(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The images have 576 to 672 pixels. Pillow rejects images of more than twice its limit."""
    data = write_shards(tmp_path, [8])[0]
    if kind == "csv":
        data = str(write_csv(tmp_path, 8))
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


def test_ranks_that_are_not_connected_share_no_slot(data: str):
    """Each rank knows only its own bad samples. Orders that depend on them would give one sample to two ranks."""
    ranks = [build_tolerant(data, world_size=2, rank=rank, batch_size=3) for rank in range(2)]
    for epoch in range(4):
        found = [index for loader in ranks for index in indices(list(loader.iterate(epoch)))]
        assert len(found) == 60 and set(found) == set(GOOD)


def test_replacements_are_spread_over_the_good_samples(tmp_path: Path):
    """A third of a shard is bad, in one run of samples. Few replacements in a batch are equal."""
    write_shards(tmp_path, [400], {number: undecodable(number) for number in range(100, 220)})
    loader = build(f"{tmp_path}/*.tar", batch_size=200, max_bad_fraction=0.4, shuffle_window=50)
    for batch in loader.iterate(0):
        times = torch.bincount(batch["index"])
        assert times.max() <= 6 and (times > 0).sum() >= 110


def test_too_many_undecodable_samples_stop_the_run(tmp_path: Path):
    write_shards(tmp_path, [20, 20], {number: undecodable(number) for number in range(0, 40, 8)})
    data = str(tmp_path / "*.tar")
    # The pattern begins with ^, because the error text must be the message, and not a worker's traceback.
    message = r"^5 bad samples in this epoch of 40, more than the allowed 10.0% .*00000.tar.*does not decode"
    with pytest.raises(BadDataError, match=message):
        list(build_tolerant(data, workers=2).iterate(0))
    assert len(list(build_tolerant(data, max_bad_fraction=0.125).iterate(0))) == 40 // 4
    # A limit applies to all samples of an epoch, also to those that the ranks have shared.
    bad = build_tolerant(data, num_samples=20, max_bad_fraction=0.125).bad
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


def test_a_shard_that_changes_before_it_is_opened(tmp_path: Path):
    """If the content changed, no sample is used, because indices may differ. A new modification time alone is accepted."""
    paths = write_shards(tmp_path, [20, 20])
    options = {"workers": 1, "max_bad_fraction": 0.4, "remote_patience": 0}
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
        BadDataError, match=rf"{refusal}.*the shard has [\d,]+ bytes, but had [\d,]+ when the manifest was made"
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
