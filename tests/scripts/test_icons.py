"""The icons data set: chosen and held-out icons, and shards, tested with a small generated collection."""

import io
import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import webdataset
from PIL import Image

from scripts.experiments import icons
from scripts.experiments.icons import IconsConfig, assign_splits, canonical_name, group_sets, read_collection
from tests.training.runs import contents

SMALL = IconsConfig(11, 4, 5, image_size=16, min_authors=2, val_sets=("gamma",), test_sets=("delta",))

NAMES = ("home", "arrow-left", "star", "cloud", "bell")


def write_collection(package: Path, sets: dict[str, dict]) -> Path:
    """Write an icon package in npm's format; each set has its own drawing for every icon name."""
    (package / "json").mkdir(parents=True)
    (package / "package.json").write_text(json.dumps({"version": "1.2.3"}))
    described = {}
    for number, (prefix, extra) in enumerate(sets.items()):
        info = {"author": {"name": f"author of {prefix}"}, "license": {"title": "MIT", "spdx": "MIT"}, "category": "UI"}
        drawings = {
            name: {"body": f'<path fill="currentColor" d="M{place} {number % 17}h6v{1 + number // 17}H{place}z"/>'}
            for place, name in enumerate(NAMES)
        }
        content = {"icons": drawings | extra.pop("icons", {}), "width": 24, "height": 24}
        described[prefix] = {"name": prefix.title()} | info | extra
        (package / "json" / f"{prefix}.json").write_text(json.dumps(content))
    (package / "collections.json").write_text(json.dumps(described))
    return package


@pytest.fixture
def package(tmp_path: Path) -> Path:
    odd = {
        "home-2-outline": {"body": '<circle cx="8" cy="4" r="4"/>', "width": 16, "height": 8},
        "hidden": {"body": '<path d="M0 0h9v9z"/>', "hidden": True},
        "spin": {"body": '<path d="M0 0h8v8z"><animate attributeName="d"/></path>'},
        "bell-thin": {"body": "<path/>"},  # a blank icon
    }
    unfit = {
        "rare": {"body": '<path d="M0 0h8v7z"/>'},  # a name of only one author
        "home-alt": {"body": '<path fill="currentColor" d="M0 1h6v1H0z"/>'},  # beta's drawing, which is for training
    }
    emoji = {"noto": {"category": "Emoji"}, "fluent-emoji": {"category": None}}
    return write_collection(
        tmp_path / "package", {"alpha": {"icons": odd}, "beta": {}, "gamma": {}, "delta": {"icons": unfit}, **emoji}
    )


def make(package: Path, output: Path, config: IconsConfig = SMALL) -> Path:
    icons.make(package, output, config, workers=1)
    return output


def read(folder: Path) -> list[dict[str, bytes]]:
    """Return the samples of a split; each maps field names to bytes."""
    dataset = webdataset.WebDataset(sorted(map(str, folder.glob("*.tar"))), shardshuffle=False)
    return [{name: data for name, data in sample.items() if name[0] != "_"} for sample in dataset]


def test_the_canonical_name_says_what_is_shown():
    names = ("baseline-arrow_Left-2-bold-duotone", "circle-filled-check", "outline", "24-7")
    assert [canonical_name(name) for name in names] == ["arrow left", "circle filled check", "outline", "24 7"]


def test_emoji_hidden_and_animated_icons_are_left_out_and_drawings_are_square(package: Path):
    sets, found = read_collection(package)
    assert set(sets) == {"alpha", "beta", "gamma", "delta"}
    alpha = {icon.name: icon for icon in found if icon.prefix == "alpha"}
    assert alpha.keys() == {*NAMES, "home-2-outline", "bell-thin"}
    image = Image.open(io.BytesIO(icons.render(alpha["home-2-outline"], 32)))
    assert image.size == (32, 32) and image.mode == "RGB"
    assert image.getpixel((16, 16)) == (0, 0, 0)  # the icon is centered in the square
    assert image.getpixel((16, 4)) == image.getpixel((4, 16)) == (255, 255, 255)
    assert icons.render(alpha["bell-thin"], 32) is None


def test_sets_of_one_author_or_family_stay_together():
    by = {"a": "X", "b": "X", "c-solid": "Y", "c-line": "Z", "fa5": "V", "fa6": "W", "d": "U"}
    groups = group_sets({prefix: {"author": {"name": author}} for prefix, author in by.items()})
    assert (groups["a"], groups["c-solid"], groups["fa5"]) == (groups["b"], groups["c-line"], groups["fa6"])
    assert len(set(groups.values())) == 4


def test_whole_sets_are_held_out_by_a_seeded_choice(tmp_path: Path):
    letters = "abcdefgh"
    package = write_collection(tmp_path / "package", {f"s{one}{two}": {} for one in letters for two in letters})
    sets, found = read_collection(package)
    splits = assign_splits(sets, found, IconsConfig(100, 10, 10, min_authors=2))
    by_split = {split: {prefix for prefix in splits if splits[prefix] == split} for split in icons.SPLITS}
    assert len(by_split["val"]) == len(by_split["test"]) == icons.HELD_OUT_GROUPS
    # The splits do not depend on the number of training pairs.
    assert assign_splits(sets, found, IconsConfig(50, 10, 10, min_authors=2)) == splits
    assert assign_splits(sets, found, IconsConfig(100, 10, 10, min_authors=2, seed=1)) != splits
    with pytest.raises(ValueError, match="too few sets"):
        assign_splits(sets, found, IconsConfig(100, 1000, 10))


def test_shards_hold_pairs_of_their_own_sets(package: Path, tmp_path: Path):
    output = make(package, tmp_path / "out")
    names = (output / "names.txt").read_text().splitlines()
    allowed = {"train": {"alpha", "beta"}, "val": {"gamma"}, "test": {"delta"}}
    for split, count in {"train": 11, "val": 4, "test": 5}.items():
        samples = read(output / split)
        assert len(samples) == count
        for sample in samples:
            described = json.loads(sample["json"])
            assert described["set"] in allowed[split]
            assert described["name"] == names[int(sample["cls"])] == canonical_name(described["icon"])
            assert sample["txt"].decode() == described["icon"].replace("-", " ")
    table = json.loads((output / "sets.json").read_text())
    assert {prefix: (row["split"], row["pairs"]) for prefix, row in table.items() if row["split"] != "train"} == {
        "gamma": ("val", 4),
        "delta": ("test", 5),
    }
    assert json.loads((output / "recipe.json").read_text())["collection"] == "@iconify/json 1.2.3"


def test_equal_arguments_give_equal_bytes_and_fewer_pairs_a_prefix(
    package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(icons, "ProcessPoolExecutor", lambda workers, *_, **__: ThreadPoolExecutor(workers))
    first, again = make(package, tmp_path / "first"), make(package, tmp_path / "again")
    assert contents(first) == contents(again)
    fewer = make(package, tmp_path / "fewer", replace(SMALL, num_train=4))
    assert read(fewer / "train") == read(first / "train")[:4]
    assert read(fewer / "test") == read(first / "test")
    with pytest.raises(ValueError, match="expected 6 pairs, found 5 in the sets"):
        make(package, tmp_path / "more", replace(SMALL, num_test=6))
    assert not (tmp_path / "more").exists()
