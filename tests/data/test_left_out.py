"""A manifest with excluded samples: training uses exactly the other samples, and no index changes."""

import hashlib
import json
import os
import uuid
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import webdataset

from openclip_ext.data import with_index
from openclip_ext.data.loader.build import build_source
from openclip_ext.data.loader.eval_loader import EvalLoader
from openclip_ext.data.manifest.__main__ import main
from openclip_ext.data.manifest.manifest import Manifest, ManifestError
from openclip_ext.data.manifest.uids import keep_listed, read_uids
from openclip_ext.data.sources.spec import DataSpec
from openclip_ext.data.storage import DEFAULT_STORAGE
from tests.data.loading import build, indices, preprocess, tokenize
from tests.data.shards import sample_members, sample_starts, undecodable, write_shards

COUNTS = [30, 17, 0, 41, 12]
N = sum(COUNTS)
# Samples at both ends, consecutive samples, samples on both sides of a shard boundary, and all samples of the last shard.
LEFT_OUT = [0, 1, 2, 29, 30, 40, *range(88, 100)]
KEPT = sorted(set(range(N)) - set(LEFT_OUT))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("data")
    write_shards(folder, COUNTS, {50: undecodable(50)})
    return str(folder / "{00000..00004}.tar")


@pytest.fixture(scope="module")
def fewer(data: str) -> str:
    path = Path(data).with_name("fewer.json")
    Manifest.scan(data).without(LEFT_OUT).save(path)
    return str(path)


def test_the_manifest_keeps_its_indices_and_says_who_is_left_out(data: str, fewer: str):
    whole, part = Manifest.scan(data), Manifest.load(fewer)
    assert part.shards == whole.shards and part.num_samples == N
    assert part.left_out.tolist() == LEFT_OUT
    assert json.loads(Path(fewer).read_text())["left_out"] == "0-2,29-30,40,88-99"
    assert part.digest != whole.digest == Manifest.scan(data).without([]).digest
    assert part.without([40, 3]).left_out.tolist() == sorted([3, *LEFT_OUT])
    assert part.left_out.tolist() == LEFT_OUT, "without() changed its manifest; it must return a new one"
    for wrong in (-1, N):
        with pytest.raises(ManifestError, match=f"cannot exclude sample {wrong}: the indices are 0 to 99"):
            whole.without([4, wrong])
    mask = np.arange(N) < 3
    for given in (mask, mask.tolist(), torch.from_numpy(mask)):
        with pytest.raises(ManifestError, match="expected indices of samples to exclude, found bool"):
            whole.without(given)


def test_an_epoch_has_only_the_others(data: str, fewer: str):
    """test_loaders.py tests that it has all of them, at their indices with their pixels."""
    loader = build(data, manifest=fewer)
    assert (loader.num_samples, loader.lanes.epoch_samples, loader.batches_per_epoch) == (N, 82, 20)
    assert build(data, manifest=fewer, num_samples=40).lanes.epoch_samples == 40
    for options in ({"resampled": True, "num_samples": 300}, {"world_size": 2, "rank": 1}):
        assert set(indices(list(build(data, manifest=fewer, **options).iterate(1)))) <= set(KEPT)


def test_other_readers_leave_them_out_too(data: str, fewer: str):
    source = build_source(DataSpec(data, manifest=fewer))
    for workers in (0, 2):
        loader = EvalLoader(source, preprocess=preprocess, tokenizer=tokenize, batch_size=8, workers=workers)
        assert sorted(indices(list(loader))) == [index for index in KEPT if index != 50]
    pipeline = with_index(webdataset.WebDataset(data, shardshuffle=False), manifest=fewer)
    assert [sample["index"] for sample in pipeline] == KEPT
    assert all(sample["txt"] == f"sample {sample['index']}".encode() for sample in pipeline)


def test_a_list_of_uids_leaves_the_others_out(tmp_path: Path, capsys: pytest.CaptureFixture):
    """The list has DataComp's format. Samples 3 and 4 have no readable uid, so they are excluded."""
    uids = [hashlib.md5(b"%d" % number).hexdigest() for number in range(10)]
    contents = {number: json.dumps({"uid": uid}).encode() for number, uid in enumerate(uids)} | {
        3: b"{}",
        4: b"no json",
    }
    replaced = {number: _with_json(number, content) for number, content in contents.items()}
    write_shards(tmp_path, [6, 4], replaced)
    chosen = [8, 3, 4, 0, 5]
    listed = np.array([(int(uids[number][:16], 16), int(uids[number][16:], 16)) for number in chosen], dtype="u8,u8")
    np.save(tmp_path / "subset.npy", listed)
    argv = [str(tmp_path / "{00000..00001}.tar"), "--output", str(tmp_path / "m.json"), "--uids"]
    assert main([*argv, str(tmp_path / "subset.npy")]) == 0
    assert Manifest.load(tmp_path / "m.json").left_out.tolist() == [1, 2, 3, 4, 6, 7, 9]
    assert "3 samples are trained on" in capsys.readouterr().out
    np.save(tmp_path / "others.npy", np.array([(1, 1)], dtype="u8,u8"))
    np.save(tmp_path / "numbers.npy", np.arange(3))
    for uid_list, message in (
        (str(tmp_path / "others.npy"), "no sample's uid is in the list"),
        (str(tmp_path / "numbers.npy"), "expected DataComp's list"),
        ("", "--uids: the value is empty"),
    ):
        assert main([*argv, uid_list]) == 1
        assert message in capsys.readouterr().err
    manifest = Manifest.scan(str(tmp_path / "{00000..00001}.tar"))
    os.truncate(tmp_path / "00001.tar", sample_starts(str(tmp_path / "00001.tar"))[2])  # it ends before sample 8
    left_out = keep_listed(manifest, read_uids(tmp_path / "subset.npy"), DEFAULT_STORAGE).left_out
    assert left_out.tolist() == [1, 2, 3, 4, 6, 7, 8, 9]
    (tmp_path / "00001.tar").unlink()
    with pytest.raises(FileNotFoundError, match=r"00001\.tar"):  # samples of an unavailable shard are not excluded
        keep_listed(manifest, read_uids(tmp_path / "subset.npy"), DEFAULT_STORAGE)


UIDS = [f"{number:032x}" for number in (1, 1 << 70, (1 << 128) - 1, 12)]
HALVES = np.array([(int(uid[:16], 16), int(uid[16:], 16)) for uid in UIDS], dtype="u8,u8")


GOOD_LISTS = {
    "halves.npy": HALVES[:2],
    "columns.npy": HALVES[:2].view("u8").reshape(2, 2),
    "texts.npy": np.array(UIDS[:2]),
    "bytes.npy": np.array(UIDS[:2], dtype="S"),
    "list.json": json.dumps(UIDS[:2]),
    "list.txt": "\n".join(UIDS[:2]) + "\n\n",
    "windows.txt": "\ufeff" + "\r\n".join(UIDS[:2]).upper(),
    "hyphens.txt": "\n".join(str(uuid.UUID(uid)) for uid in UIDS[:2]),
    "short.txt": "\n".join(uid.lstrip("0") for uid in UIDS[:2]),
}
BAD_LISTS = {
    "objects.npy": np.array(UIDS[:2], dtype=object),
    "numbers.json": "[1, 2]",
    "object.json": "{",
    "header.txt": "uid\n1",
    "long.txt": "1" * 33,
    "empty.txt": "",
    "raw.npy": HALVES[:2].tobytes(),
    "truncated.npy": b"\x93NUMPY\x01",
}


@pytest.mark.parametrize(
    ("name", "zeros"), [*((name, True) for name in GOOD_LISTS | BAD_LISTS), ("halves.npy", False), ("texts.npy", False)]
)
def test_formats_of_uid_lists(tmp_path: Path, capsys: pytest.CaptureFixture, caplog: Any, name: str, zeros: bool):
    """The samples' uids may lack leading zeros, too. A list in another format raises an error that names the flag."""
    uids = [uid if zeros else uid.lstrip("0") for uid in UIDS]
    contents = [json.dumps({"uid": uid}).encode() for uid in [*uids, "nothing"]]
    write_shards(tmp_path, [5], {number: _with_json(number, content) for number, content in enumerate(contents)})
    path, listed = tmp_path / name, (GOOD_LISTS | BAD_LISTS)[name]
    if isinstance(listed, np.ndarray):
        np.save(path, listed, allow_pickle=True)
    else:
        path.write_bytes(listed.encode() if isinstance(listed, str) else listed)
    status = main([str(tmp_path / "00000.tar"), "--output", str(tmp_path / "m.json"), "--uids", str(path)])
    error = capsys.readouterr().err
    if name in BAD_LISTS:
        assert status == 1 and f"--uids {path}" in error and "pickle" not in error
    else:
        assert status == 0, error
        assert Manifest.load(tmp_path / "m.json").left_out.tolist() == [2, 3, 4]
        assert "1 of 5 samples have no hexadecimal uid" in caplog.text


def _with_json(number: int, content: bytes) -> list[tuple[str, bytes]]:
    return [(name, content if name.endswith("json") else data) for name, data in sample_members(number)]
