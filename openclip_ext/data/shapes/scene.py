"""The scenes of the demo images and their captions.

A scene has one or two items on a background. Every word of the vocabulary is one token of OpenCLIP's tokenizer. The longest
caption has 18 of the 20 tokens that the demo models read.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

SHAPES = ("circle", "square", "triangle", "diamond", "star", "cross", "heart", "moon")
COLORS = ("red", "orange", "yellow", "green", "blue", "purple", "pink", "brown", "black", "white")
SIZES = ("small", "medium", "large")
TEXTURES = ("plain", "striped", "dotted", "checked")
BACKGROUNDS = ("grass", "sand", "water", "snow", "brick", "stone")
RELATIONS = ("left", "right", "above", "below")
SPLITS = ("train", "test")

_RELATION_PHRASES = {
    "left": ("left of", "to the left of"),
    "right": ("right of", "to the right of"),
    "above": ("above", "over"),
    "below": ("below", "under"),
}
_INVERSE_RELATION = {"left": "right", "right": "left", "above": "below", "below": "above"}

PAIRS = tuple((shape, color) for shape in SHAPES for color in COLORS)
# The 16 pairs that the training split lacks: two colors per shape, and one or two shapes per color. It still contains every
# shape and every color.
HELD_OUT_PAIRS = frozenset(
    (shape, COLORS[(row + shift) % len(COLORS)]) for row, shape in enumerate(SHAPES) for shift in (0, 5)
)
_SEEN_PAIRS = tuple(pair for pair in PAIRS if pair not in HELD_OUT_PAIRS)

_TWO_ITEMS = 0.5
_KEEP_WORD = 0.5
_KEEP_RELATION = 0.75
_KEEP_NOUN = 0.9

_STREAMS = ("scene", "pixels", "caption")


@dataclass(frozen=True)
class Item:
    """One item in a scene."""

    shape: str
    color: str
    size: str
    texture: str

    @property
    def pair(self) -> tuple[str, str]:
        return self.shape, self.color


@dataclass(frozen=True)
class Scene:
    """One or two items on a background. ``relation`` is the position of the first item relative to the second."""

    items: tuple[Item, ...]
    background: str
    relation: str | None = None

    @classmethod
    def from_attributes(cls, attributes: dict[str, Any]) -> "Scene":
        """Return the scene that a sample's ``json`` member describes."""
        items = tuple(Item(**item) for item in attributes["items"])
        return cls(items, attributes["background"], attributes["relation"])


def generator_of(stream: str, seed: int, split: str, index: int) -> np.random.Generator:
    """Return a sample's generator for ``stream`` ("scene", "pixels" or "caption"); the streams are independent."""
    return np.random.default_rng([seed, SPLITS.index(split), index, _STREAMS.index(stream)])


def sample_scene(seed: int, split: str, index: int) -> Scene:
    """Return the scene of a sample. Shape-color pairs are equally likely: 64 in ``train``, all 80 in ``test``."""
    generator = generator_of("scene", seed, split, index)
    pairs = _SEEN_PAIRS if split == "train" else PAIRS
    count = 2 if generator.random() < _TWO_ITEMS else 1
    # The two items differ, because no caption could distinguish two equal items.
    chosen = generator.choice(len(pairs), size=count, replace=False)
    items = tuple(
        Item(shape, color, _pick(generator, SIZES), _pick(generator, TEXTURES))
        for shape, color in (pairs[pair] for pair in chosen)
    )
    background = _pick(generator, BACKGROUNDS)
    relation = _pick(generator, RELATIONS) if count == 2 else None
    return Scene(items, background, relation)


def sample_caption(scene: Scene, generator: np.random.Generator, complete: bool = False) -> str:
    """Return a caption of a scene.

    Args:
        generator: Random numbers for the order of the items, the synonyms and the omitted words.
        complete: Whether to keep all words. If not, most captions are incomplete, like captions from the web: size, color,
            texture and background are each kept with probability 1/2, the relation with 3/4 (else "and"), and the noun with
            9/10 (else "shape").
    """

    def keep(probability: float) -> bool:
        # Complete captions also draw a random number here, for the same order and synonyms as in incomplete captions.
        return generator.random() < probability or complete

    items, relation = scene.items, scene.relation
    if relation is not None and generator.random() < 0.5:
        items, relation = items[::-1], _INVERSE_RELATION[relation]
    parts = [_noun_phrase(items[0], keep)]
    if relation is not None:
        phrase = _pick(generator, _RELATION_PHRASES[relation])
        parts += [phrase if keep(_KEEP_RELATION) else "and", _noun_phrase(items[1], keep)]
    if keep(_KEEP_WORD):
        parts.append(f"on {scene.background}")
    return " ".join(parts)


def describe(scene: Scene, relation: str | None) -> str:
    """Return a complete caption in fixed order and wording, with this ``relation``. None omits the second item."""
    parts = [_noun_phrase(scene.items[0])]
    if relation is not None:
        parts += [_RELATION_PHRASES[relation][0], _noun_phrase(scene.items[1])]
    return " ".join([*parts, f"on {scene.background}"])


def _noun_phrase(item: Item, keep: Callable[[float], bool] = lambda probability: True) -> str:
    words = [word for word in (item.size, item.color, item.texture) if keep(_KEEP_WORD)]
    words.append(item.shape if keep(_KEEP_NOUN) else "shape")
    article = "an" if words[0][0] in "aeiou" else "a"
    return " ".join([article, *words])


def _pick(generator: np.random.Generator, options: tuple[str, ...]) -> str:
    return options[int(generator.integers(len(options)))]
