"""Bad samples are replaced and counted, too many of them stop the run, and nothing hangs."""

import logging
import os
from pathlib import Path

import numpy as np
import pytest
import torch

from openclip_ext.data.source import BadDataError
from openclip_ext.data.train_loader import TrainLoader
from tests.data.loading import assert_equal, build, indices
from tests.data.shards import sample_members, sample_starts, undecodable, write_shards, write_tar

NO_CAPTION = ["jpg", "json"]


def bad_caption(number: int) -> list[tuple[str, bytes]]:
    return [(name, b"\xff\xfe\xff" if name.endswith("txt") else data) for name, data in sample_members(number)]


BAD = {
    3: sample_members(3, NO_CAPTION),
    17: undecodable(17),
    40: bad_caption(40),
    55: sample_members(55, ["txt"]),
}


@pytest.fixture
def data(tmp_path: Path) -> str:
    write_shards(tmp_path, [20, 20, 20], BAD)
    return str(tmp_path / "{00000..00002}.tar")


def build_tolerant(data: str, **options) -> TrainLoader:
    return build(data, **{"max_bad_fraction": 0.1} | options)


@pytest.mark.parametrize("workers", [0, 2])
def test_bad_samples_are_replaced_and_counted(data: str, workers: int, caplog: pytest.LogCaptureFixture):
    loader = build_tolerant(data, workers=workers)
    with caplog.at_level(logging.WARNING):
        batches = list(loader.iterate(2))
    assert len(batches) == loader.batches_per_epoch == 15
    assert all(len(batch["index"]) == 4 for batch in batches)
    found = indices(batches)
    assert set(BAD).isdisjoint(found)
    assert set(found) == set(range(60)) - set(BAD)
    twice = sorted(np.flatnonzero(np.bincount(found) == 2) // 20)
    assert twice == [0, 0, 2, 2], "a replacement comes from the shard of the bad sample"
    counts = {os.path.basename(shard): count for shard, count in loader.bad_samples().items()}
    assert counts == {"00000.tar": 2, "00002.tar": 2}
    for reason in ("no caption: expected txt, found jpg, json", "the image does not decode", "utf-8", "no image"):
        assert reason in caplog.text
    list(loader.iterate(3))
    assert sum(loader.bad_samples().values()) == 4, "a bad sample counts once, however often it comes"
    assert sum(loader.check_bad_samples().values()) == 4


@pytest.mark.parametrize("key", ["txt", "json:caption"])
def test_a_sample_with_an_empty_caption_is_a_bad_one(tmp_path: Path, key: str, caplog: pytest.LogCaptureFixture):
    empty = {"txt": b" \n", "json": b'{"caption": ""}'}
    replaced = [(name, empty.get(name.rpartition(".")[2], data)) for name, data in sample_members(3)]
    (path,) = write_shards(tmp_path, [20], {3: replaced})
    loader = build_tolerant(path, caption_key=key)
    with caplog.at_level(logging.WARNING):
        found = indices(list(loader.iterate(0)))
    assert 3 not in found and len(found) == 20
    assert loader.bad_samples() == {path: 1} and "no caption: the text is empty" in caplog.text


def test_resuming_is_bitwise_with_bad_samples(data: str):
    loader = build_tolerant(data)
    whole = list(loader.iterate(0))
    for done in (1, 6, 14):
        assert_equal(list(build_tolerant(data).iterate(0, loader.extend_progress(None, done))), whole[done:])
    # Replacements depend on seed, epoch and index alone.
    assert sorted(indices(whole)) == sorted(indices(list(build_tolerant(data, workers=2, batch_size=6).iterate(0))))


@pytest.mark.parametrize("workers", [0, 2])
def test_too_many_undecodable_samples_stop_the_run(tmp_path: Path, workers: int):
    write_shards(tmp_path, [20, 20], {number: undecodable(number) for number in range(0, 40, 8)})
    data = str(tmp_path / "*.tar")
    # From the first character on: a message to the user, not a worker's traceback.
    message = r"^\d bad samples in this epoch of 40, more than the allowed 10.0% .*00000.tar.*does not decode"
    with pytest.raises(BadDataError, match=message):
        list(build_tolerant(data, workers=workers).iterate(0))
    assert len(list(build_tolerant(data, workers=workers, max_bad_fraction=0.125).iterate(0))) == 10


@pytest.mark.parametrize("workers", [0, 2])
def test_a_shard_without_a_usable_sample_stops_the_run(tmp_path: Path, workers: int):
    write_shards(tmp_path, [30, 4], {number: undecodable(number) for number in range(30, 34)})
    message = r"00001.tar has no usable sample among its 4; sample 3\d: the image does not decode"
    with pytest.raises(BadDataError, match=message):
        list(build(str(tmp_path / "*.tar"), workers=workers, max_bad_fraction=1.0).iterate(0))


def test_a_shard_that_is_cut_off_while_it_is_read(tmp_path: Path):
    (path,) = write_shards(tmp_path, [800])
    loader = build(path, shuffle_window=0)
    batches = loader.iterate(0)
    next(batches)
    os.truncate(path, 100 * 512)
    with pytest.raises(BadDataError, match=r"00000.tar has no usable sample among its 800.*cannot be read"):
        list(batches)


def test_lost_samples_count_for_the_start(tmp_path: Path):
    """Samples 10 to 19 are overwritten: they have no index, and the run would not miss them."""
    (path,) = write_shards(tmp_path, [40])
    starts = sample_starts(path)
    with open(path, "r+b") as file:
        file.seek(starts[10])
        file.write(b"x" * (starts[20] - starts[10]))
    with pytest.raises(
        BadDataError, match=r"1[01] of 30 samples .* are lost or have no .*00000.tar: damaged: no readable"
    ):
        build(path)
    found = indices(list(build(path, max_bad_fraction=0.5).iterate(0)))
    assert len(set(found)) == 28


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("gone", "FileNotFoundError"),
        ("cut", r"it has [\d,]+ bytes, [\d,]+ when the manifest was made"),
        ("other order", "replaced by a file with other samples"),
        ("touched", None),
    ],
)
def test_a_shard_that_changes_before_it_is_opened(tmp_path: Path, workers: int, change: str, message: str | None):
    """Its samples may not be the indexed ones, so none of them is used, unless it was only touched."""
    paths = write_shards(tmp_path, [20, 20])
    loader = build(str(tmp_path / "*.tar"), workers=workers, max_bad_fraction=1.0)
    size = os.path.getsize(paths[1])
    if change == "gone":
        os.unlink(paths[1])
    elif change == "cut":
        os.truncate(paths[1], size - 512)
    else:
        numbers = range(20, 40) if change == "touched" else reversed(range(20, 40))
        write_tar(Path(paths[1]), [member for number in numbers for member in sample_members(number)])
        assert os.path.getsize(paths[1]) == size
        os.utime(paths[1], ns=(1, 1))
    if message is None:
        assert sorted(indices(list(loader.iterate(0)))) == list(range(40))
        return
    with pytest.raises(BadDataError, match=f"00001.tar has no usable sample.*{message}"):
        list(loader.iterate(0))


def test_an_error_of_the_transform_is_not_a_bad_sample_and_leaves_the_generators(tmp_path: Path):
    """It is a mistake in the program, and says where it came from."""

    def broken(image):
        torch.rand(1)
        raise ZeroDivisionError("a mistake")

    loader = build(write_shards(tmp_path, [8]), preprocess=broken)
    before = torch.get_rng_state()
    with pytest.raises(ZeroDivisionError, match="a mistake"):
        list(loader.iterate(0))
    assert torch.equal(torch.get_rng_state(), before)
