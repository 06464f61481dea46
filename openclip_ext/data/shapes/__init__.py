"""The demo set: images of colored shapes with captions, made on the machine, one pure function of (seed, split, index).

``python -m openclip_ext.data.shapes --output DIR --num-samples N`` writes it as WebDataset; :mod:`.scene` says what there
is to see and how it is put into words, :mod:`.render` draws it and :mod:`.write` makes the shards.
"""

from openclip_ext.data.shapes.render import IMAGE_SIZE, render
from openclip_ext.data.shapes.scene import (
    BACKGROUNDS,
    COLORS,
    HELD_OUT_PAIRS,
    PAIRS,
    RELATIONS,
    SHAPES,
    SIZES,
    SPLITS,
    TEXTURES,
    Item,
    Scene,
    sample_caption,
    sample_scene,
)
from openclip_ext.data.shapes.write import Sample, make_sample, write_shards

__all__ = [
    "BACKGROUNDS",
    "COLORS",
    "HELD_OUT_PAIRS",
    "IMAGE_SIZE",
    "PAIRS",
    "RELATIONS",
    "SHAPES",
    "SIZES",
    "SPLITS",
    "TEXTURES",
    "Item",
    "Sample",
    "Scene",
    "make_sample",
    "render",
    "sample_caption",
    "sample_scene",
    "write_shards",
]
