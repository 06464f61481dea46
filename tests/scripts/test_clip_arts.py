"""The clip arts: titles, captions, what is left out, and the shards, on a small package made here."""

import io
import json
import tarfile
from pathlib import Path

import pytest
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from scripts.experiments import clip_arts
from scripts.experiments.clip_arts import ClipArtsConfig, read_pairs
from scripts.experiments.pairs import SPLITS

SMALL = ClipArtsConfig(num_val=1, num_test=2, image_size=8)


def draw(path: Path, title: str | None, shade: int, size: tuple[int, int] = (6, 3)) -> None:
    """A picture that no other shade has: one dark pixel on a transparent ground."""
    path.parent.mkdir(parents=True, exist_ok=True)
    image = Image.new("RGBA", size)
    image.putpixel((0, 0), (shade, 0, 0, 255))
    info = PngInfo()
    if title is not None:
        info.add_text("Title", title)
    image.save(path, pnginfo=info)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "png"
    draw(folder / "animals/birds/pollo_01.png", "Grünes Pollo &amp; Co".encode().decode("latin-1"), 10)
    draw(folder / "animals/frog-2.png", None, 20)
    for number in range(5):
        draw(folder / f"computer/lemon-theme/key_{number}.png", "Lemon theme", 30 + number)
    draw(folder / "food/tea.png", "Tea", 50)
    draw(folder / "food/tea_again.png", "Tea again", 50)  # the same picture
    draw(folder / "shapes/stars/star_1.png", "A star", 60)
    Image.new("RGBA", (4, 4)).save(folder / "food/nothing.png")
    (folder / "link.png").symlink_to(folder / "food/tea.png")
    return folder


def test_captions_are_folders_and_titles(source: Path):
    captions = {pair.caption for pair in read_pairs(source, SMALL)}
    assert {"animals birds: grünes pollo & co", "animals: frog 2"} <= captions
    assert {f"computer lemon theme: key {number}" for number in range(5)} <= captions  # not their collection's title
    assert len(captions & {"food: tea", "food: tea again"}) == 1  # equal pictures count once
    assert len(captions) == 8  # no star, no link, nothing invisible


def test_pictures_are_padded_to_a_white_square(source: Path):
    frog = next(pair for pair in read_pairs(source, SMALL) if pair.caption == "animals: frog 2")
    image = Image.open(io.BytesIO(frog.png))
    assert image.size == (8, 8) and image.mode == "RGB"
    assert image.getpixel((4, 0)) == image.getpixel((7, 4)) == (255, 255, 255)
    assert image.getpixel((0, 2)) != (255, 255, 255)
    assert frog.described == {"name": "frog", "file": "animals/frog-2.png"}


def test_the_splits_are_disjoint_and_equal_on_every_call(source: Path, tmp_path: Path):
    for name in ("first", "again"):
        clip_arts.main(["--source", str(source), "--output", str(tmp_path / name), "--num-val", "1", "--num-test", "2"])
    files = sorted(path.relative_to(tmp_path / "first") for path in (tmp_path / "first").rglob("*.*"))
    assert all((tmp_path / "first" / file).read_bytes() == (tmp_path / "again" / file).read_bytes() for file in files)
    texts = {split: read_texts(tmp_path / "first" / split) for split in SPLITS}
    assert [len(texts[split]) for split in SPLITS] == [5, 1, 2]
    assert len(set().union(*texts.values())) == 8
    assert json.loads((tmp_path / "first" / "recipe.json").read_text())["pairs"] == 8


def read_texts(folder: Path) -> list[str]:
    with tarfile.open(folder / "00000.tar") as tar:
        return [tar.extractfile(member).read().decode() for member in tar if member.name.endswith(".txt")]


def test_a_missing_package_is_said(tmp_path: Path):
    with pytest.raises(SystemExit, match="has 0 pictures, 1400 to hold out: install openclipart-png"):
        clip_arts.main(["--source", str(tmp_path / "none"), "--output", str(tmp_path / "out")])
    assert not (tmp_path / "out").exists()
