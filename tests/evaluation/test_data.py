"""Evaluation data are read completely and in order. Corrupt data are an error and get no score."""

import gzip
import os
import re
import shutil
import tarfile
from collections.abc import Callable, Container
from pathlib import Path

import pytest
import torch

from openclip_ext.evaluation.download import BROKEN, check_set
from openclip_ext.evaluation.open_tasks import datacomp_task
from openclip_ext.evaluation.samples import DataError, SampleFormat, read_classes, read_lines, read_shard, shard_samples
from openclip_ext.evaluation.scoring import MAX_SKIPPED, Scores
from openclip_ext.evaluation.tasks import FLICKR, TASKS, WINOGAVIL
from tests.evaluation import datasets


@pytest.fixture
def evaluate(tmp_path, make_encoder) -> Callable[[str], Scores]:
    """Return a function that scores a data set in ``tmp_path`` with two data workers."""
    return lambda key: datacomp_task(TASKS[key], tmp_path, any_size=True).score(make_encoder(workers=2))


@pytest.fixture
def folder(tmp_path) -> Path:
    """Return the folder of a new classification data set with 24 samples in 3 shards."""
    return datasets.make_task(tmp_path, "cifar10", shards=3)


def test_every_sample_is_read_once_and_the_global_random_state_stays(folder, make_encoder):
    before = torch.get_rng_state()
    batches = list(make_encoder(workers=2).batches(shard_samples(folder, SampleFormat(num_classes=10))))
    keys = [key for batch in batches for key in batch.keys]
    assert keys == [f"s{index:07d}" for shard in range(3) for index in range(shard, 24, 3)]
    assert not any(batch.skipped for batch in batches)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("classnames.txt", None, "classnames.txt not found"),
        ("zeroshot_classification_templates.txt", "\n \n", "templates.txt is empty: expected the prompt templates"),
        (
            "zeroshot_classification_templates.txt",
            "a photo of {c.x}\n",
            "templates.txt: expected {c} for the class name",
        ),
        ("zeroshot_classification_templates.txt", "a photo\n", "templates.txt: expected {c} for the class name"),
        ("classnames.txt", "zero\none\n", "expected DataComp's 10 classes, found 2"),
        ("classnames.txt", "".join(f"{name}\n" for name in "0123 456789\n"), "line 5 is blank, so later labels"),
        ("classnames.txt", b"\xff\xfe", "is not UTF-8"),
        ("test/nshards.txt", "1000000000", "expected the number of shards, found '1000000000'"),
        ("test/nshards.txt", "2", "expected 2 shards .*missing or extra: 2.tar"),
        ("test/nshards.txt", "4", "expected 4 shards .*missing or extra: 3.tar"),
    ],
)
def test_wrong_texts_are_named(folder, file, content, message, make_encoder):
    path = folder / file
    if content is None:
        path.unlink()
    else:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(DataError, match=message.replace("{", r"\{").replace("}", r"\}")):
        datacomp_task(TASKS["cifar10"], folder.parent).score(make_encoder())


def test_a_byte_order_mark_and_the_end_of_the_file_are_not_part_of_the_class_names(folder):
    (folder / "classnames.txt").write_bytes("\ufeffa dog\r\na cat \r\n\r\n".encode())
    assert read_lines(folder / "classnames.txt", "class names", are_labels=True) == ["a dog", "a cat"]


def test_a_tar_that_ends_between_two_members_is_named(folder):
    shard = folder / "test" / "1.tar"
    with tarfile.open(shard) as archive:
        boundary = archive.getmembers()[4].offset
    for size in (boundary + 512, boundary, 0):
        os.truncate(shard, size)
        with pytest.raises(DataError, match=r"1\.tar is truncated"):
            shard_samples(folder, SampleFormat())


def test_compressed_tars_are_refused(folder):
    shard = folder / "test" / "1.tar"
    shard.write_bytes(gzip.compress(shard.read_bytes()))
    with pytest.raises(DataError, match=r"1\.tar is compressed: expected a plain tar.* Decompress it"):
        shard_samples(folder, SampleFormat())


def test_a_damaged_header_in_the_middle_is_named(folder, evaluate):
    shard = folder / "test" / "2.tar"
    with tarfile.open(shard) as archive:
        member = archive.getmembers()[6]
    with open(shard, "r+b") as stream:
        stream.seek(member.offset)
        stream.write(b"x" * 300)
    before = set(torch.multiprocessing.active_children())
    with pytest.raises(DataError, match=rf"2\.tar is truncated or corrupt .*at byte {member.offset}"):
        evaluate("cifar10")
    assert set(torch.multiprocessing.active_children()) == before  # all workers have exited


def spoil(shard: Path, places: Container[int], **values: bytes | None) -> None:
    """Set fields of some samples of a shard. None removes a field, and ``image`` means the first field."""
    samples = list(read_shard(shard))
    for fields in (sample.fields for place, sample in enumerate(samples) if place in places):
        for name, value in values.items():
            name = next(iter(fields)) if name == "image" else name
            fields[name] = value
            if value is None:
                del fields[name]
    datasets.write_shard(shard, [(sample.key, sample.fields) for sample in samples])


CAMELYON, FAIRFACE = "wilds/camelyon17", "fairness/fairface"


@pytest.mark.parametrize(
    ("key", "values", "message"),
    [
        ("cifar10", {"cls": b"10"}, r"expected a label \(.cls\) below 10, found b'10'"),
        ("cifar10", {"cls": b"-1"}, ".*below 10, found b'-1'"),
        ("cifar10", {"image": None}, "no .webp or .png or .jpg or .jpeg file, found"),
        (CAMELYON, {"npy": b"nonsense"}, r"the metadata \(.npy\) cannot be read"),
        (CAMELYON, {"npy": datasets.npy_bytes([1, 2, 3]).replace(b"{", b"]")}, r"the metadata \(.npy\) cannot be read"),
        (CAMELYON, {"npy": datasets.npy_bytes([1, 2])}, r"expected 3 non-negative integers .*found int64 \[1, 2\]"),
        (CAMELYON, {"npy": None}, "no .npy file"),
        (FLICKR, {"txt": b"\n\n"}, "expected one caption per line"),
        (FLICKR, {"txt": "gr\u00fcn".encode("latin-1")}, r"the captions \(.txt\) are not UTF-8 text"),
        (FAIRFACE, {"npy": datasets.npy_bytes([9, 0, 0, 1])}, "expected age below 9 in the .npy, found"),
        (FAIRFACE, {"npy": datasets.npy_bytes([0, 2, 0, 1])}, "expected gender below 2 in the .npy, found"),
    ],
)
def test_wrong_samples_are_named(tmp_path, key, values, message, evaluate):
    folder = datasets.make_task(tmp_path, key, shards=3)
    spoil(folder / "test" / "1.tar", {3}, **values)
    with pytest.raises(DataError, match=f"s0000010: {message}"):
        evaluate(key)


def test_an_image_that_does_not_decode_is_skipped_and_named(folder, evaluate):
    spoil(folder / "test" / "1.tar", {3}, image=b"no image")
    result = evaluate("cifar10")
    assert (result.samples, result.found, len(result.skipped)) == (23, 24, 1)
    assert "1.tar: s0000010: the image does not decode: the format is unknown" in str(result.skipped[0])


def test_a_skipped_image_takes_its_captions_and_instances_along(tmp_path, evaluate):
    for key in (FLICKR, WINOGAVIL):
        folder = datasets.make_task(tmp_path, key)
        spoil(folder / "test" / "0.tar", {0}, jpg=b"")
    assert evaluate(FLICKR).samples == 23
    instances = folder / "instances.jsonl"
    using = [line for line in instances.read_text().splitlines() if '"s0000000"' in line]
    users = len(using)
    result = evaluate(WINOGAVIL)
    assert users > 0
    assert (result.found, result.samples) == (24, 24 - users)
    assert result.skipped[0].endswith(f"; {users} of 24 instances use it")
    instances.write_text("\n".join(using))
    with pytest.raises(DataError, match=f"has all its images; .*{users} of {users} instances use it"):
        evaluate(WINOGAVIL)


def test_many_undecodable_images_are_no_score(tmp_path, evaluate):
    folder = datasets.make_task(tmp_path, "cifar10", count=2 * MAX_SKIPPED, shards=1)
    spoil(folder / "test" / "0.tar", range(MAX_SKIPPED), image=b"")
    assert evaluate("cifar10").samples == MAX_SKIPPED
    for skipped, message in (
        (MAX_SKIPPED + 1, f"{MAX_SKIPPED + 1} of {2 * MAX_SKIPPED} images do not decode"),
        (2 * MAX_SKIPPED, "No image to score"),
    ):
        spoil(folder / "test" / "0.tar", range(skipped), image=b"")
        with pytest.raises(DataError, match=message):
            evaluate("cifar10")
    # In WinoGAViL, the share is of the images, of which there may be more than instances.
    folder = datasets.make_task(tmp_path, WINOGAVIL, images=101 * (MAX_SKIPPED + 1), shards=1)
    spoil(folder / "test" / "0.tar", range(MAX_SKIPPED + 1), image=b"")
    assert len(evaluate(WINOGAVIL).skipped) == MAX_SKIPPED + 1


def test_a_copied_shard_is_no_score(folder, evaluate):
    shutil.copy(folder / "test" / "0.tar", folder / "test" / "2.tar")
    message = r"key 's0000000' occurs twice, in .*0\.tar and in .*2\.tar"
    with pytest.raises(DataError, match=message):
        evaluate("cifar10")
    state, problems = check_set(folder.parent, TASKS["cifar10"], any_size=True)
    assert state == BROKEN and re.search(message, problems[0])


def test_winogavil_instances_are_checked(tmp_path, evaluate):
    path = datasets.make_task(tmp_path, WINOGAVIL) / "instances.jsonl"
    lines = path.read_text()
    for line, message in (
        ("{}", "line 1: expected an object with cue"),
        ('{"cue": "owl", "candidates": ["a", "b"], "associations": ["c"]}', "an association that is not a candidate"),
        ('{"cue": "owl", "candidates": ["elsewhere"], "associations": ["elsewhere"]}', "line 1: no image elsewhere"),
    ):
        path.write_text(f"{line}\n{lines}")
        with pytest.raises(DataError, match=message):
            evaluate(WINOGAVIL)


def test_faces_need_the_classes_with_fixed_numbers(tmp_path, evaluate):
    path = datasets.make_task(tmp_path, FAIRFACE) / "classnames.txt"
    classnames, _ = read_classes(path.parent)  # accepts any number of classes
    assert classnames == path.read_text().splitlines()
    people = "".join(line for line in path.read_text().splitlines(True) if "person 1" not in line)
    for content, message in (
        (people, "expected more than 18 lines toxic:CLASS, found 16"),
        ("race:black\ngender:male\nage:old\n", "no lines for toxic"),
    ):
        path.write_text(content)
        with pytest.raises(DataError, match=message):
            evaluate(FAIRFACE)
