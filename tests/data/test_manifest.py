"""Manifests: sample counts, indices, reports, rejected data, and how a run finds or creates its manifest."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from openclip_ext.data.manifest import scan
from openclip_ext.data.manifest.__main__ import main
from openclip_ext.data.manifest.find import find_or_create_manifest
from openclip_ext.data.manifest.manifest import Manifest, ManifestError, _checksum
from openclip_ext.data.shards.shardlist import expand_components, expand_shards, shard_name, sibling
from openclip_ext.data.sources.keys import Key, parse_keys
from openclip_ext.data.sources.source import BadDataError
from openclip_ext.data.sources.spec import DataSpec
from tests.data.shards import image_bytes, sample_members, sample_starts, write_shards, write_sizes, write_tar

COUNTS = [3, 5, 2]


@pytest.fixture
def shards(tmp_path: Path) -> list[str]:
    return write_shards(tmp_path / "data", COUNTS)


def test_specifications_expand_as_in_openclip(shards: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    data = tmp_path / "data"
    for name in ("00000.parquet", "00000_stats.json", "00000.tar.idx"):  # of img2dataset and DALI
        (data / name).touch()
    assert DataSpec(str(data)).resolved_type == DataSpec(f"{data}::{data}").resolved_type == "webdataset"
    for specification in (
        str(data),
        f"file:{data}/",
        str(data / "{00000..00002}.tar"),
        str(data / "0000[0-2].tar"),
        "::".join(shards),
        [str(data / "{00000..00001}.tar"), shards[2]],
        [f"{shards[0]}::{shards[1]}", f"file:{shards[2]}"],
    ):
        assert expand_shards(specification) == shards, specification
    monkeypatch.chdir(data)
    assert expand_shards("{00000..00002}.tar") == shards
    assert expand_components(f"{shards[0]}::{data}/{{00001,00002}}.tar") == [shards[:1], shards[1:]]
    pipes = expand_shards("pipe:cat a/{0..1}.tar*::https://x.org/get?[1].tar*")
    assert pipes == ["pipe:cat a/0.tar*", "pipe:cat a/1.tar*", "https://x.org/get?[1].tar*"]
    os.link(shards[0], data / "again.tar")
    for wrong, message in (
        ([], "no shards"),
        (str(data / "*.nothing"), "no file matches"),
        ("memory://nothing/*.tar", r"no file matches 'memory://nothing/\*.tar'"),
        ("https://x.org/*.tar", "a web server does not list its files: name them with braces"),
        ([*shards, str(data / "again.tar")], r"again.tar is given twice \(also as .*00000.tar\)"),
        (os.fsdecode(b"b\xff/0.tar"), "udcff/0.tar' is not UTF-8.*: rename"),
    ):
        with pytest.raises(ValueError, match=message):
            expand_shards(wrong)


def test_names_and_neighbors_of_shards():
    for url, name, other in (
        ("s3://bucket/a/00000.tar", "00000.tar", "s3://bucket/a/sizes.json"),
        ("pipe:aws s3 cp s3://b/00000.tar -", "00000.tar", "pipe:aws s3 cp s3://b/sizes.json -"),
        ("pipe:curl 'https://x.org/a.b/00.tar?t=5'", "00.tar", "pipe:curl 'https://x.org/a.b/sizes.json?t=5'"),
        ("https://x.org/d/00.tar.gz", "00.tar.gz", "https://x.org/d/sizes.json"),
        ("pipe:cat folder/some-file", "some-file", None),
        ("/data/it's=2.tar", "it's=2.tar", "/data/sizes.json"),
    ):
        assert shard_name(url) == name
        assert sibling(url, "sizes.json") == other


def test_keys():
    keys = (Key("txt"), Key("png"), Key("meta.json", "text"))
    assert parse_keys("txt; PNG;meta.json:text", allow_json=True) == keys
    for text, allow_json in ((";", True), ("json:url", False), ("json:", True), ("txt:a", True)):
        with pytest.raises(ValueError, match=r"no key|is not understood"):
            parse_keys(text, allow_json)


def test_problems_are_reported_by_shard(tmp_path: Path):
    replaced = {1: sample_members(1, ["txt"]), 2: sample_members(2, ["jpg"]), 3: sample_members(3, ["json"])}
    shards = write_shards(tmp_path, [5, 3, 4], replaced | {6: sample_members(5)})
    os.truncate(shards[2], os.path.getsize(shards[2]) - 10 * 1024)
    manifest = Manifest.scan(shards)
    problems = [shard.problems for shard in manifest.shards]
    assert problems[0] == {"bad": 3, "bad_positions": [1, 2, 3], "without_image": 2, "without_caption": 2}
    assert problems[1] == {"duplicate_keys": 1}
    assert "error" in problems[2]
    first, second, third = manifest.report()
    assert "2 samples without image, 2 samples without caption, at positions [1, 2, 3]" in first
    assert "1 duplicate keys" in second and "corrupt or truncated" in third
    manifest.save(tmp_path / "m.json")
    assert [shard.problems for shard in Manifest.load(tmp_path / "m.json").shards] == problems


def test_an_empty_caption_or_image_is_a_missing_one(tmp_path: Path):
    """img2dataset writes an empty file for a null caption. The first caption field counts, even if it is empty."""
    replaced = {1: [("1.jpg", image_bytes(1)), ("1.txt", b"")], 2: [("2.jpg", b""), ("2.txt", b"a caption")]}
    replaced[3] = [("3.jpg", image_bytes(3)), ("3.txt", b""), ("3.json", b'{"caption": "not asked"}')]
    shards = write_shards(tmp_path, [5], replaced)
    problems = {"bad": 3, "bad_positions": [1, 2, 3], "without_image": 1, "without_caption": 2}
    for caption_key in ("txt", "txt;json:caption"):
        assert Manifest.scan(shards, caption_key=caption_key).shards[0].problems == problems
    assert Manifest.scan(shards, caption_key="json:caption;txt").shards[0].problems["bad_positions"] == [1, 2]


PAIRS = [sample_members(number, ["jpg", "txt"]) for number in range(3)]
# Shards without usable samples: bytes, or members of a tar, and the cause and fix that the error must report.
UNUSABLE = {
    "page": (b"\n<!DOCTYPE html><html>please sign in</html>", "a page of HTML or XML; download it again"),
    "parquet": (b"PAR1" + bytes(600), "a Parquet file; expected shards.* or a CSV"),
    "nothing": (b"", "it is empty; remove it"),
    "garbage": (b"no tar" * 1000, "corrupt, or not a tar.*begins with b'no tarno"),
    # All images come first, and then all captions.
    "unsorted": ([pair[field] for field in (0, 1) for pair in PAIRS], "sort them: tar --sort=name"),
    "folders": ([(f"{'ab'[field]}/{pair[field][0]}", b"x") for pair in PAIRS for field in (0, 1)], "different folders"),
    "dots": ([(f"photo.{name}", b"x") for pair in PAIRS for name, _ in pair], "names have dots.*photo.000000.jpg"),
    "others": (
        [(f"{name}2", b"x") for pair in PAIRS for name, _ in pair],
        r"fields jpg2 \(3\), txt2 \(3\).*--image-key",
    ),
    "folder": (None, "it is a folder; expected shards"),
    "table": (b"filepath,title\n0.jpg,a\n", "a CSV file, which needs no manifest"),
    "gone": (None, "cannot be read: No such file"),
}


def test_what_would_train_wrongly_is_refused_with_its_cause(shards: list[str], tmp_path: Path):
    (tmp_path / "folder.tar").mkdir()
    for name, (content, message) in UNUSABLE.items():
        path = tmp_path / f"{name}.{'csv' if name == 'table' else 'tar'}"
        if content is not None:
            path.write_bytes(content) if isinstance(content, bytes) else write_tar(path, content)
        with pytest.raises(ValueError, match=f"(?s)1 of 4 shards have no usable sample.*{path.name}: .*{message}"):
            Manifest.scan([*shards, str(path)])
    empty = [str(write_tar(tmp_path / name, [])) for name in ("empty.tar", "empty too.tar")]
    with pytest.raises(ValueError, match="the data set is empty"):
        Manifest.scan(empty)
    with_empty = Manifest.scan([*shards, empty[0]])
    assert (with_empty.num_samples, with_empty.num_lost) == (10, 0)


def test_entries_that_captions_are_not_in(tmp_path: Path):
    other = b'{"text": "a", "texts": ["a", "b"], "caption": " ", "number": 1}'
    replaced = {number: [*sample_members(number, ["jpg"]), (f"{number:06d}.json", other)] for number in (0, 2, 30)}
    (shard,) = write_shards(tmp_path, [40], replaced)
    for path in (shard, f"pipe:gzip -c {shard}"):
        counted = Manifest.scan([path], caption_key="json:caption", journal=tmp_path / "journal").shards[0]
        assert counted.problems == {"bad": 3, "bad_positions": [0, 2, 30], "without_caption": 3}
        assert counted.num_samples == 40
        other_keys = Manifest.scan([path], caption_key="txt;json:x", journal=tmp_path / "journal")
        assert other_keys.shards[0].problems["bad_positions"] == [0, 2, 30]
    with pytest.raises(
        ManifestError, match=r"a caption \(json:captions\).*json:caption \(37\), json:text \(3\), json:texts \(3\)"
    ):
        Manifest.scan([shard], caption_key="json:captions")


def test_names_of_files_give_a_terminal_nothing_to_obey(tmp_path: Path, capsys):
    hostile = str(write_tar(tmp_path / "a\x1b]0;pwned\x07.tar", [*sample_members(1, ["jpg"]), *sample_members(2)]))
    assert (main([hostile]), main([hostile, hostile]), str(BadDataError("\x1b"))) == (0, 1, r"\x1b")
    shown = "".join(capsys.readouterr())
    assert shown.count(r"a\x1b]0;pwned\x07.tar") == 2 and "\x1b" not in shown and "\x07" not in shown


def test_a_run_makes_its_manifest_and_finds_it_again(
    shards: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    made = find_or_create_manifest(shards)
    assert (tmp_path / "data" / "manifest.json").exists()
    subset = find_or_create_manifest(shards[:2])
    captions = find_or_create_manifest(shards, caption_key="json:caption")
    assert (made.num_samples, subset.num_samples, captions.num_samples) == (10, 8, 10)
    assert len(list((tmp_path / "data").glob("manifest-*.json"))) == 2, "expected two more manifests"
    monkeypatch.setattr(scan, "scan_local", lambda *args, **options: pytest.fail("a shard was scanned again"))
    assert find_or_create_manifest(shards).shards == made.shards
    assert find_or_create_manifest(shards[:2]).shards == subset.shards
    assert find_or_create_manifest(str(tmp_path / "data" / "*.tar"), caption_key="json:caption").num_samples == 10
    given = tmp_path / "data" / "manifest.json"
    assert find_or_create_manifest(shards, manifest=given).num_samples == 10
    with pytest.raises(ManifestError, match="does not match the training data"):
        find_or_create_manifest(shards[:2], manifest=given)


def test_shards_with_special_characters_in_their_names(shards: list[str], tmp_path: Path):
    for shard, name in zip(shards, ("train:0.tar", "a{0..1}.tar", "$HOME.tar"), strict=True):
        shutil.move(shard, tmp_path / "data" / name)
    made = find_or_create_manifest(str(tmp_path / "data" / "*.tar"))
    assert made.num_samples == 10
    found = Manifest.load(tmp_path / "data" / "manifest.json")
    assert [shard.url for shard in found.shards] == [shard.url for shard in made.shards]


@pytest.mark.parametrize("folder", ["[v1]", "{a,b}", "a*", "[v1]/{x}"])
def test_existing_folders_are_no_patterns(
    shards: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: str
):
    """A pattern after such a folder is expanded. The working directory may also have such a name."""
    there = tmp_path / folder
    there.mkdir(parents=True)
    moved = [shutil.move(shard, there) for shard in shards]
    for pattern in ("{00000..00002}.tar", "*.tar", "0000[0-2].tar"):
        assert expand_shards(f"{there}/{pattern}") == expand_shards(f"file://{there}/{pattern}") == moved
    monkeypatch.chdir(there)
    assert expand_shards("*.tar") == expand_shards(f"../{Path(folder).name}/*.tar") == moved
    assert expand_shards(f"{there}/missing.tar") == [f"{there}/missing.tar"]


def test_in_a_c_locale_a_utf8_path_is_not_to_be_renamed(shards: list[str], tmp_path: Path):
    folder = tmp_path / "bücher"
    shutil.move(tmp_path / "data", folder)
    command = [sys.executable, "-m", "openclip_ext.data.manifest", str(folder / "*.tar")]
    environment = {"LC_ALL": "C", "PYTHONUTF8": "0"}
    found = subprocess.run(command, env=os.environ | environment, capture_output=True)
    assert found.returncode == 1
    assert b"export LC_ALL=C.UTF-8" in found.stderr and b"rename" not in found.stderr
    assert subprocess.run(command, env=os.environ | environment | {"LC_ALL": "C.UTF-8"}).returncode == 0


def test_samples_that_are_gone_are_estimated(tmp_path: Path):
    """Samples 3 to 5 are overwritten, including their headers."""
    (path,) = write_shards(tmp_path, [20])
    starts = sample_starts(path)
    data = bytearray(Path(path).read_bytes())
    for filling in (b"\0", b"x"):
        data[starts[3] : starts[6]] = filling * (starts[6] - starts[3])
        Path(path).write_bytes(data)
        manifest = Manifest.scan([path])
        assert (manifest.num_samples, manifest.num_bad) == (17, 0)
        assert 3 <= manifest.num_lost <= 4
        assert re.search("about [34] samples lost", next(manifest.report()))
    # The shard is truncated. The size of the missing part is unknown, so only a minimum is reported.
    Path(path).write_bytes(data[: starts[12] + 700])
    assert "about 4 samples lost, corrupt or truncated" in next(Manifest.scan([path]).report())
    Path(path).write_bytes(data)
    # If img2dataset's statistics show a larger loss, it replaces the estimate.
    (tmp_path / "00000_stats.json").write_text('{"successes": 24}')
    assert Manifest.scan([path]).num_lost == 7


def test_command_line(
    shards: list[str], tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    write_tar(Path(shards[1]), [*sample_members(3), *sample_members(4, ["jpg"])])
    output = ["--output", str(tmp_path / "m.json"), "--workers", "1"]
    assert main([str(tmp_path / "data" / "{00000..00002}.tar"), *output]) == 0
    printed = capsys.readouterr().out
    assert f"{shards[1]}: 1 samples without caption, at positions [1]" in printed
    assert "7 samples in 3 shards, 1 (14.29%) without image or caption" in printed
    assert main([*shards, *output, "--caption-key", "txt;jpg"]) == 0
    assert Manifest.load(tmp_path / "m.json").num_bad == 0
    # Without --output, the command overwrites manifest.json only if it belongs to the same shards.
    assert main(shards) == main(shards[:2]) == main(shards[:2]) == 0
    assert Manifest.load(tmp_path / "data" / "manifest.json").num_samples == 7
    (named,) = (tmp_path / "data").glob("manifest-*.json")
    assert str(named) in capsys.readouterr().out and find_or_create_manifest(shards[:2]).num_samples == 5
    content = Path(shards[2]).read_bytes()
    assert main([*shards, "--output", shards[2]]) == 1
    assert "exists and is not a manifest: give another --output" in capsys.readouterr().err
    assert Path(shards[2]).read_bytes() == content
    monkeypatch.setattr(Manifest, "scan", None)  # the check comes before the scan
    assert main([*shards, "--output", str(tmp_path / "none" / "m.json")]) == 1
    assert "none does not exist or is read-only: give another --output" in capsys.readouterr().err


def test_command_line_needs_no_torch(shards: list[str]):
    """Without torch, the command starts in a fraction of a second, and runs on storage machines."""
    code = "import sys; from openclip_ext.data.manifest.__main__ import main; main(sys.argv[1:]); "
    code += "assert not {'torch', 'webdataset', 'pandas'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code, *shards], check=True, capture_output=True)


def test_a_file_has_counts_and_indices(shards: list[str], tmp_path: Path):
    path = tmp_path / "data" / "m.json"
    manifest = Manifest.scan(shards, workers=2)
    assert [(shard.num_samples, shard.first_index) for shard in manifest.shards] == [(3, 0), (5, 3), (2, 8)]
    assert (manifest.num_samples, manifest.num_bad, list(manifest.report())) == (10, 0, [])
    Manifest.scan(shards[:2]).save(path)
    manifest.save(path)
    content = json.loads(path.read_text())
    assert content["num_samples"] == 10
    assert [entry["name"] for entry in content["shards"]] == ["00000.tar", "00001.tar", "00002.tar"]
    loaded = Manifest.load(path)
    assert (loaded.shards, loaded.digest) == (manifest.shards, manifest.digest)
    shutil.move(path.parent, tmp_path / "elsewhere")
    moved = Manifest.load(tmp_path / "elsewhere" / "m.json")
    assert moved.verify([shard.url for shard in moved.shards]) is False, "shards moved with their manifest"
    assert [Path(shard.url).parent.name for shard in moved.shards] == ["elsewhere"] * 3


def test_remote_counts_come_from_what_lies_beside_the_shards(shards: list[str], tmp_path: Path):
    """Counts come from sizes.json, img2dataset's statistics or the argument ``sizes``. The shards are empty here."""
    piped, scanned = [f"pipe:cat {shard}" for shard in shards], Manifest.scan(shards)
    for shard in shards:
        os.truncate(shard, 0)
    write_sizes(tmp_path / "data", COUNTS)
    manifest = Manifest.scan(piped)
    assert [shard.first_index for shard in manifest.shards] == [0, 3, 8]
    assert scanned.index_digest and Manifest([scanned.shards[0], *manifest.shards[1:]]).index_digest is None
    manifest.save(tmp_path / "m.json")
    assert Manifest.load(tmp_path / "m.json").shards == manifest.shards
    sizes = json.loads((tmp_path / "data" / "sizes.json").read_text())
    (tmp_path / "data" / "sizes.json").unlink()
    for shard, count in zip(shards, COUNTS, strict=True):
        path = Path(shard.replace(".tar", "_stats.json"))
        path.write_text(json.dumps({"count": count + 3, "successes": count}))
    assert Manifest.scan(piped).num_samples == 10
    path.write_text('{"successes": -1}')
    for given in (None, {"00000.tar": 3, "00001.tar": 5}, sizes | {"00002.tar": -2}):
        with pytest.raises(ValueError, match=r"unknown for 1 of 3 shards.*00002.tar.*--sizes"):
            Manifest.scan(piped, sizes=given)
    with pytest.raises(ManifestError, match="unknown for 1 of 1 shards"):  # a command without the name of a tar
        Manifest.scan([f"pipe:cat {tmp_path / 'm.json'}"])
    assert Manifest.scan(piped, sizes=sizes).num_samples == 10
    other = piped[0].replace("/data/", "/data/other/")
    with pytest.raises(ValueError, match=r"--sizes has one count for 00000.tar, but 2 shards"):
        Manifest.scan([*piped, other], sizes=sizes)


def test_shards_that_were_touched_or_moved_verify(shards: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    manifest = Manifest.scan(shards)
    assert manifest.verify(shards) is manifest.verify(shards[::-1]) is False
    shutil.move(tmp_path / "data", tmp_path / "elsewhere")
    moved = [shard.replace("/data/", "/elsewhere/") for shard in shards]
    assert manifest.verify(moved) is True
    assert [shard.url for shard in manifest.shards] == moved
    find_or_create_manifest(moved)
    os.utime(moved[1], ns=(1, 1))
    assert manifest.verify(moved) is True
    find_or_create_manifest(moved)
    monkeypatch.setattr(scan, "scan_local", lambda *args, **options: pytest.fail("an unchanged shard was scanned"))
    assert manifest.verify(moved) is False
    find_or_create_manifest(moved)


def test_changed_shards_do_not_verify(shards: list[str]):
    """A checkpoint's loss state is stored by index, so a run must not replace the manifest by itself."""
    manifest = find_or_create_manifest(shards)
    # A renamed sample keeps the size of the shard and all positions, but the shard differs from the scanned one.
    size = os.path.getsize(shards[0])
    members = [(name.replace("000001", "000009"), data) for n in range(3) for name, data in sample_members(n)]
    write_tar(Path(shards[0]), members)
    assert os.path.getsize(shards[0]) == size
    os.utime(shards[0], ns=(1, 1))
    with pytest.raises(ManifestError, match=r"1 of 3 shards were changed.*00000.tar \(3 samples, were 3"):
        find_or_create_manifest(shards)
    write_tar(Path(shards[0]), sample_members(0))
    message = r"00000.tar \(the shard has [\d,]+ bytes, but had [\d,]+ when .*Create the manifest again"
    with pytest.raises(ManifestError, match=message):
        find_or_create_manifest(shards)
    assert main(shards) == 0
    assert find_or_create_manifest(shards).num_samples == 8
    os.unlink(shards[2])
    with pytest.raises(ManifestError, match=r"1 of 3 shards of the manifest do not exist: .*00002.tar"):
        manifest.verify(shards)


def test_a_manifest_goes_elsewhere_where_the_folder_is_read_only(
    shards: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    save = Manifest.save

    def read_only(manifest: Manifest, path: Path) -> None:
        if Path(path).parent == tmp_path / "data":
            raise PermissionError(13, "Permission denied")
        save(manifest, path)

    monkeypatch.setattr(Manifest, "save", read_only)
    assert find_or_create_manifest(shards).num_samples == find_or_create_manifest(shards).num_samples == 10
    assert len(list((tmp_path / "cache" / "openclip_ext").glob("manifest-*.json"))) == 1
    # A user without a home folder
    monkeypatch.chdir(tmp_path)
    for name in ("XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name)
    monkeypatch.setattr("pwd.getpwuid", lambda _: {}["no entry"])
    assert find_or_create_manifest(shards).num_samples == 10 and not Path("~").exists()


def test_a_damaged_file_is_named_and_another_made(shards: list[str], tmp_path: Path, caplog):
    """In the first case, a digit of a shard's size is changed: only the checksum shows that the manifest is corrupt."""
    made = find_or_create_manifest(shards)
    path = tmp_path / "data" / "manifest.json"
    intact = path.read_bytes()
    flipped = bytearray(intact)
    flipped[intact.index(str(os.path.getsize(shards[0])).encode())] ^= 1
    content = {key: value for key, value in json.loads(intact).items() if key != "checksum"} | {"version": 9}
    other_version = json.dumps(content | {"checksum": _checksum(content)}).encode()
    for damaged in (flipped, other_version, intact[: len(intact) // 2], b"", b"[]"):
        path.write_bytes(damaged)
        caplog.clear()
        with pytest.raises(ManifestError, match="or is corrupt"):
            find_or_create_manifest(shards, manifest=path)
        assert find_or_create_manifest(shards).shards == made.shards
        assert f"{path} is not a manifest, or is corrupt" in caplog.text and path.read_bytes() == damaged
    assert len(list(path.parent.glob("manifest-*.json"))) == 1
