"""Horizontal flips that keep caption and image consistent: they also exchange 'left' and 'right' in the caption."""

import random
import re

from PIL import ImageOps
from torch import Tensor

from openclip_ext.data.sources.source import DecodedImage

_SIDES = re.compile(r"\b(left|right)\b", flags=re.IGNORECASE)
_OPPOSITE = {"left": "right", "right": "left"}


def flip_at_random(image: DecodedImage, caption: str) -> tuple[DecodedImage, str]:
    """Mirror an image with probability 1/2 and exchange 'left' and 'right' in its caption (CLIP-Lite, section 4.1).

    The decision uses one random number from :mod:`random`. The loader seeds this module for each sample.
    """
    if random.random() < 0.5:
        return image, caption
    mirrored = image.flip(-1) if isinstance(image, Tensor) else ImageOps.mirror(image)
    return mirrored, exchange_sides(caption)


def exchange_sides(caption: str) -> str:
    """Exchange the words 'left' and 'right' and keep their capitals (LEFT, Left). Longer words ('leftover') do not change."""
    return _SIDES.sub(_opposite, caption)


def _opposite(match: re.Match[str]) -> str:
    word = match.group()
    opposite = _OPPOSITE[word.lower()]
    if word.isupper():
        return opposite.upper()
    return opposite.capitalize() if word[0].isupper() else opposite
