"""A data set of images in two colors, with captions such as ``red over blue``."""

import io
from pathlib import Path

import numpy as np
from PIL import Image

COLORS = {"red": (255, 0, 0), "green": (0, 255, 0), "blue": (0, 0, 255), "black": (0, 0, 0), "white": (255, 255, 255)}


def members(count: int, size: int = 16) -> list[tuple[str, bytes]]:
    """Return the tar members of ``count`` samples: a square image, its caption, and the number of the upper color."""
    names, found = list(COLORS), []
    for number in range(count):
        upper, lower = number * 7 % 5, number * 3 // 5 % 5
        pixels = np.zeros((size, size, 3), np.uint8)
        pixels[: size // 2], pixels[size // 2 :] = COLORS[names[upper]], COLORS[names[lower]]
        Image.fromarray(pixels).save(buffer := io.BytesIO(), "PNG")
        caption = f"{names[upper]} over {names[lower]}"
        fields = {"png": buffer.getvalue(), "txt": caption.encode(), "cls": str(upper).encode()}
        found += [(f"{number:06d}.{field}", data) for field, data in fields.items()]
    return found


def write_names(folder: Path) -> None:
    """Write ``names.txt``, whose lines are the names of the classes."""
    (folder / "names.txt").write_text("".join(f"{name}\n" for name in COLORS))
