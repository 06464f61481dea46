"""The clip-art data set: titles, captions, excluded images and shards, tested with a small generated package."""

import io
import json
from pathlib import Path

import pytest
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from scripts.experiments import clip_arts
from scripts.experiments.clip_arts import ClipArtsConfig, read_pairs
from scripts.experiments.pairs import SPLITS
from tests.scripts.test_icons import read
from tests.training.runs import contents

SMALL = ClipArtsConfig(num_val=1, num_test=2, image_size=8)


def draw(path: Path, title: str | None, shade: int) -> None:
    """Write an image of one dark pixel on a transparent background. The shade of the pixel makes the image unique."""
    path.parent.mkdir(parents=True, exist_ok=True)
    image = Image.new("RGBA", (6, 3))
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
    draw(folder / "food/tea_again.png", "Tea again", 50)  # equal to tea.png
    draw(folder / "shapes/stars/star_1.png", "A star", 60)
    Image.new("RGBA", (4, 4)).save(folder / "food/nothing.png")
    (folder / "link.png").symlink_to(folder / "food/tea.png")
    return folder


def test_captions_are_folders_and_titles(source: Path):
    pairs = {pair.caption: pair for pair in read_pairs(source, SMALL)}
    captions = pairs.keys()
    assert {"animals birds: grünes pollo & co", "animals: frog 2"} <= captions
    assert {f"computer lemon theme: key {number}" for number in range(5)} <= captions  # not the collection's title
    assert len(captions & {"food: tea", "food: tea again"}) == 1  # equal images count once
    assert len(captions) == 8  # stars, links and blank images are excluded
    frog = pairs["animals: frog 2"]
    image = Image.open(io.BytesIO(frog.png))
    assert image.size == (8, 8) and image.getpixel((7, 4)) == (255, 255, 255) != image.getpixel((0, 2))  # on white
    assert frog.described == {"name": "frog", "file": "animals/frog-2.png"}


def test_the_splits_are_disjoint_and_equal_on_every_call(source: Path, tmp_path: Path):
    for name in ("first", "again"):
        clip_arts.main(["--source", str(source), "--output", str(tmp_path / name), "--num-val", "1", "--num-test", "2"])
    assert contents(tmp_path / "first") == contents(tmp_path / "again")
    texts = [[sample["txt"] for sample in read(tmp_path / "first" / split)] for split in SPLITS]
    assert [len(found) for found in texts] == [5, 1, 2]
    assert len(set().union(*texts)) == 8
    assert json.loads((tmp_path / "first" / "recipe.json").read_text())["pairs"] == 8
