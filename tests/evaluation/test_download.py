"""The download command with a fake hub on localhost: its output, and the files on disk."""

import json
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pandas as pd
import pytest

from openclip_ext.evaluation.download import (
    BROKEN,
    INCOMPLETE,
    MISSING,
    OK,
    check_set,
    count_items,
    main,
    repository_of,
)
from openclip_ext.evaluation.samples import read_shard
from openclip_ext.evaluation.tasks import FLICKR, TASKS, WINOGAVIL
from tests.evaluation import datasets
from tests.evaluation.fake_hub import FakeHub

DIGITS = "mnist"  # a task with ten classes, like the digits of datasets.py


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    """Yield a fake hub that serves MNIST in DataComp's format: 3 shards, and files that no evaluation uses."""
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)  # allow requests
    origin = datasets.make_task(tmp_path / "hub", DIGITS, shards=3)
    (origin / "README.md").write_text("MIT")
    (origin / ".gitattributes").write_text("*.tar filter=lfs")
    (origin / "train").mkdir()
    (origin / "train" / "0.tar").write_bytes(b"not needed")
    with FakeHub() as fake:
        fake.repositories[repository_of(TASKS[DIGITS])] = origin
        yield fake


def download(hub: FakeHub, data_dir: Path, *arguments: str, task: str = DIGITS) -> int:
    return status("--data-dir", str(data_dir), "--tasks", task, "--endpoint", hub.endpoint, *arguments)


def status(*arguments: str) -> int:
    """Run the download command; return its exit status."""
    with pytest.raises(SystemExit) as stop:
        main(list(arguments))
    return stop.value.code


def verify(data_dir: Path, task: str = DIGITS) -> str:
    return check_set(data_dir, TASKS[task], any_size=True)[0]


def problems_of(data_dir: Path, task: str) -> str:
    state, problems = check_set(data_dir, TASKS[task], any_size=True)
    assert state == BROKEN
    return " ".join(problems)


def test_sources_of_all_tasks() -> None:
    repositories = {key: repository_of(task) for key, task in TASKS.items()}
    assert repositories["vtab/pets"] == "djghosh/wds_vtab-pets_test"
    assert repositories["fairness/geode"] == "djghosh/wds_geode_test"
    assert repositories[FLICKR] == "nlphuji/flickr_1k_test_image_text_retrieval"
    assert repositories[WINOGAVIL] == "nlphuji/winogavil"
    assert len(set(repositories.values())) == len(TASKS) == 40


def test_fetches_exactly_the_data_set_and_verifies_every_byte(
    hub: FakeHub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data_dir = tmp_path / "data"
    assert download(hub, data_dir, "--dry-run") == 0
    assert not data_dir.exists() and "7 files" in capsys.readouterr().out

    assert download(hub, data_dir) == 0
    folder, origin = data_dir / TASKS[DIGITS].folder, hub.repositories[repository_of(TASKS[DIGITS])]
    files = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    wanted = ["README.md", "classnames.txt", "test/0.tar", "test/1.tar", "test/2.tar", "test/nshards.txt"]
    assert files == sorted([*wanted, "zeroshot_classification_templates.txt"])
    assert all((folder / name).read_bytes() == (origin / name).read_bytes() for name in wanted)
    assert verify(data_dir) == OK

    hub.requests.clear()
    assert status("--data-dir", str(data_dir), "--tasks", DIGITS, "--endpoint", "http://127.0.0.1:9") == 0
    assert hub.requests == []

    template_file = folder / "zeroshot_classification_templates.txt"
    template_file.write_text(template_file.read_text().replace("photo", "image"))
    assert download(hub, data_dir) == 0 and "image" in template_file.read_text()
    assert download(hub, data_dir, "--checksums") == 0 and "photo" in template_file.read_text()
    template_file.unlink()
    assert verify(data_dir) == INCOMPLETE
    assert download(hub, data_dir) == 0
    assert verify(data_dir) == OK


def test_an_interrupted_download_keeps_complete_files(
    hub: FakeHub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hub.busy["test/1.tar"] = 1000
    assert download(hub, tmp_path) == 1
    error = capsys.readouterr().err
    assert "503" in error and "run the same command again" in error
    assert (tmp_path / TASKS[DIGITS].folder / "test" / "0.tar").exists()
    assert verify(tmp_path) == INCOMPLETE
    hub.busy.clear()
    hub.requests.clear()
    assert download(hub, tmp_path) == 0
    assert "test/1.tar" in hub.requests and {"test/0.tar", "classnames.txt"}.isdisjoint(hub.requests)
    assert verify(tmp_path) == OK


def test_a_wrong_checksum_is_fetched_again(hub: FakeHub, tmp_path: Path) -> None:
    hub.corrupt["test/0.tar"] = 1
    hub.corrupt["classnames.txt"] = 1  # small files have git's checksum instead of a SHA-256
    assert download(hub, tmp_path) == 0
    assert verify(tmp_path) == OK


def test_a_damaged_tar_can_be_repaired(hub: FakeHub, tmp_path: Path) -> None:
    assert download(hub, tmp_path) == 0
    shard = tmp_path / TASKS[DIGITS].folder / "test" / "0.tar"
    content = shard.read_bytes()
    shard.write_bytes(bytes([content[0] ^ 1]) + content[1:])
    assert "Remove it, and download it again" in problems_of(tmp_path, DIGITS)
    shard.unlink()
    assert download(hub, tmp_path) == 0 and verify(tmp_path) == OK and shard.read_bytes() == content


def test_one_failing_set_stops_no_other(hub: FakeHub, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--data-dir", str(tmp_path), "--tasks", "cifar10", DIGITS, "--endpoint", hub.endpoint]
    assert status(*arguments) == 1
    captured = capsys.readouterr()
    assert "failed: cifar10" in captured.err and "1 of 2 data sets are complete" in captured.out
    assert verify(tmp_path) == OK


@pytest.mark.parametrize("key", [DIGITS, "wilds/fmow", "fairness/fairface", FLICKR, WINOGAVIL])
def test_verify_finds_what_is_broken(tmp_path: Path, key: str, capsys: pytest.CaptureFixture[str]) -> None:
    task = TASKS[key]
    assert verify(tmp_path, key) == MISSING
    folder = datasets.make_task(tmp_path, key, count=24)
    assert verify(tmp_path, key) == OK and count_items(folder, task, any_size=True) == 24
    assert "24 samples, but DataComp's data set has" in " ".join(check_set(tmp_path, task)[1]) or task.classes != 10
    assert status("--data-dir", str(tmp_path), "--tasks", key, "--verify", "--allow-size-mismatch") == 0
    assert status("--data-dir", str(tmp_path), "--tasks", key, "--verify") == 1
    assert "0 of 1 data sets" in capsys.readouterr().out

    tar = folder / "test" / "0.tar"
    whole = tar.read_bytes()
    tar.write_bytes(whole[: len(whole) // 1024 * 512])
    assert "truncated" in problems_of(tmp_path, key)
    tar.write_bytes(whole)
    if key == WINOGAVIL:
        instances = (folder / "instances.jsonl").read_text()
        (folder / "instances.jsonl").write_text(instances.replace('"s0000001"', '"painting"'))
        assert "no image painting in the shards" in problems_of(tmp_path, key)


def write_zip(path: Path, names: list[str]) -> dict[str, bytes]:
    images, _ = datasets.digit_images(len(names))
    contents = {name: datasets.image_bytes(image, "JPEG") for name, image in zip(names, images, strict=True)}
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in contents.items():
            archive.writestr(f"images/{name}", content)
            archive.writestr(f"__MACOSX/images/._{name}", b"resource fork")
    return contents


def test_retrieval_comes_through_the_conversion(
    hub: FakeHub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    origin, data_dir = tmp_path / "origin", tmp_path / "data"
    rows = [
        {"raw": json.dumps(["A dog, running.", "Two lines\nof  text"]), "split": "test", "filename": "10.jpg"},
        {"raw": json.dumps(["Ein Hund läuft."]), "split": "train", "filename": "11.jpg"},
        {"raw": json.dumps(["Eine Straße."]), "split": "test", "filename": "COCO_val.2014.jpg"},
    ]
    origin.mkdir()
    pd.DataFrame(rows).to_csv(origin / "test_1k.csv", index=False)
    (origin / "LICENSE").write_text("terms")
    hub.repositories[repository_of(TASKS[FLICKR])] = origin
    write_zip(origin / "images.zip", ["10.jpg"])
    assert download(hub, data_dir, task=FLICKR) == 1
    assert "no image 'COCO_val.2014.jpg'" in capsys.readouterr().err
    assert verify(data_dir, FLICKR) == INCOMPLETE
    contents = write_zip(origin / "images.zip", ["10.jpg", "COCO_val.2014.jpg"])
    with zipfile.ZipFile(origin / "images.zip", "a") as archive:
        archive.writestr("other/10.jpg", contents["COCO_val.2014.jpg"])
    assert download(hub, data_dir, task=FLICKR) == 1
    assert "different images '10.jpg' in several folders" in capsys.readouterr().err
    pd.DataFrame([*rows, rows[0]]).to_csv(origin / "test_1k.csv", index=False)
    assert download(hub, data_dir, task=FLICKR) == 1
    assert "two rows for '10.jpg'" in capsys.readouterr().err
    pd.DataFrame(rows).to_csv(origin / "test_1k.csv", index=False)
    contents = write_zip(origin / "images.zip", ["10.jpg", "11.jpg", "COCO_val.2014.jpg"])
    assert download(hub, data_dir, task=FLICKR) == 0

    folder = data_dir / TASKS[FLICKR].folder
    assert {path.name for path in folder.iterdir()} == {"LICENSE", "dataset_type.txt", "test"}
    assert (folder / "dataset_type.txt").read_text() == "retrieval\n"
    assert {sample.key: sample.fields for sample in read_shard(folder / "test" / "0.tar")} == {
        "10": {"jpg": contents["10.jpg"], "txt": b"A dog, running.\nTwo lines of text"},
        "COCO_val_2014": {"jpg": contents["COCO_val.2014.jpg"], "txt": "Eine Straße.".encode()},
    }
    assert verify(data_dir, FLICKR) == OK and count_items(folder, TASKS[FLICKR], any_size=True) == 2


def test_winogavil_comes_through_the_conversion(hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    origin, data_dir = tmp_path / "origin", tmp_path / "data"
    names = ["tea party", "snow", "owl", "moon", "tree"]
    rows = [
        {"cue": "Night", "candidates": json.dumps(names), "associations": json.dumps(["owl", "moon"])},
        {"cue": "cold", "candidates": json.dumps(names[1:]), "associations": json.dumps(["snow"])},
    ]
    origin.mkdir()
    pd.DataFrame(rows).to_csv(origin / "winogavil.csv")
    pd.DataFrame([{"a": "1"}]).to_csv(origin / "other.csv")
    contents = write_zip(origin / "winogavil_images.zip", [f"{name}.jpg" for name in [*names, "unused"]])
    hub.repositories[repository_of(TASKS[WINOGAVIL])] = origin
    monkeypatch.setattr("openclip_ext.evaluation.convert.IMAGES_PER_SHARD", 2)
    assert download(hub, data_dir, task=WINOGAVIL) == 0
    folder = data_dir / TASKS[WINOGAVIL].folder
    assert not (folder / "source").exists()
    assert (folder / "test" / "nshards.txt").read_text() == "3\n"
    samples = {one.key: one.fields for shard in range(3) for one in read_shard(folder / "test" / f"{shard}.tar")}
    assert samples == {name: {"jpg": contents[f"{name}.jpg"]} for name in names}
    lines = [json.loads(line) for line in (folder / "instances.jsonl").read_text().splitlines()]
    assert lines[0] == {"cue": "Night", "candidates": names, "associations": ["owl", "moon"]}
    assert lines[1]["associations"] == ["snow"]
    assert verify(data_dir, WINOGAVIL) == OK and count_items(folder, TASKS[WINOGAVIL], any_size=True) == 2
