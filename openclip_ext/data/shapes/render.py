"""Draw a scene with numpy. Shapes are evaluated on a grid three times as fine as the image.

Each shape is a function of coordinates from -1 to 1: ``u`` (right) and ``v`` (down), relative to the item's center, size and
angle. Edges are smooth, because a pixel's opacity is the fraction of its fine points inside the shape.
"""

from collections.abc import Callable

import numpy as np

from openclip_ext.data.shapes.scene import Item, Scene

IMAGE_SIZE = 32
_SUPERSAMPLING = 3

Array = np.ndarray

_RGB = {
    "red": (216, 38, 38),
    "orange": (246, 134, 20),
    "yellow": (248, 220, 48),
    "green": (34, 140, 58),
    "blue": (34, 76, 212),
    "purple": (132, 50, 176),
    "pink": (250, 142, 192),
    "brown": (120, 72, 36),
    "black": (24, 24, 26),
    "white": (248, 248, 246),
}
# The second color of a pattern must be visible on every item: it is lighter than dark colors and darker than light colors.
_DARK_COLORS = frozenset({"red", "green", "blue", "purple", "brown", "black"})
_PATTERN_CONTRAST = 0.55
_RADIUS = {"small": (4.7, 5.3), "medium": (6.2, 6.8), "large": (7.7, 8.3)}  # pixels
_DIRECTION = {"left": (-1, 0), "right": (1, 0), "above": (0, -1), "below": (0, 1)}

_MAX_TURN = np.deg2rad(15.0)
_CONTOUR_WIDTH = 1.0  # pixels
_CONTOUR_OPACITY = 0.5
_TINT = 8.0  # standard deviation of the tint of an item or background, on a scale of 255
_PIXEL_NOISE = 4.0


def render(scene: Scene, generator: np.random.Generator) -> Array:
    """Draw a scene as RGB ``(32, 32, 3)`` uint8. Position, exact size, angle, tints and noise are random."""
    canvas = _BACKGROUNDS[scene.background](generator)
    for item, center in zip(scene.items, _centers(scene, generator), strict=True):
        _draw_item(canvas, item, center, generator)
    canvas *= generator.uniform(0.9, 1.05)
    canvas += generator.normal(0.0, _PIXEL_NOISE, canvas.shape)
    return np.clip(np.rint(canvas), 0, 255).astype(np.uint8)


def _centers(scene: Scene, generator: np.random.Generator) -> list[Array]:
    """Return the position ``(x, y)`` of each item in pixels. Items do not overlap."""
    middle = IMAGE_SIZE / 2
    if scene.relation is None:
        return [middle + generator.uniform(-6.0, 6.0, 2)]
    along = np.array(_DIRECTION[scene.relation], dtype=float)
    across = np.abs(along[::-1])
    # Items are 16 pixels apart along one axis and at most 5 along the other, so only one of the four relations is true.
    half = 8.0 * along + generator.uniform(-2.5, 2.5) * across
    drift = generator.uniform(-3.0, 3.0) * across
    return [middle + drift + half, middle + drift - half]


def _draw_item(canvas: Array, item: Item, center: Array, generator: np.random.Generator) -> None:
    radius = generator.uniform(*_RADIUS[item.size])
    angle = generator.uniform(-_MAX_TURN, _MAX_TURN)
    first = _tinted(_RGB[item.color], generator)
    second = (
        first + (255 - first) * _PATTERN_CONTRAST if item.color in _DARK_COLORS else first * (1 - _PATTERN_CONTRAST)
    )
    contour = 235.0 if item.color == "black" else 20.0

    # First and last pixels that the item can cover.
    low = np.clip(np.floor(center - 1.5 * radius), 0, IMAGE_SIZE).astype(int)
    high = np.clip(np.ceil(center + 1.5 * radius), 0, IMAGE_SIZE).astype(int)
    columns, rows = slice(low[0], high[0]), slice(low[1], high[1])
    y, x = _fine(rows)[:, None] - center[1], _fine(columns)[None, :] - center[0]
    u, v = np.cos(angle) * x + np.sin(angle) * y, np.cos(angle) * y - np.sin(angle) * x
    outline = _OUTLINES[item.shape]
    grown = radius + _CONTOUR_WIDTH
    inside = outline(u / radius, v / radius)
    around = _coverage(outline(u / grown, v / grown)) * _CONTOUR_OPACITY
    body = _coverage(inside)
    pattern = _coverage(inside & _PATTERNS[item.texture](u, v))

    patch = canvas[rows, columns]
    patch += around * (contour - patch)
    patch *= 1 - body
    patch += (body - pattern) * first + pattern * second


def _fine(pixels: slice) -> Array:
    """Return the coordinates (in pixels) of the fine grid points in a range of pixels."""
    return (np.arange(pixels.start * _SUPERSAMPLING, pixels.stop * _SUPERSAMPLING) + 0.5) / _SUPERSAMPLING


def _coverage(mask: Array) -> Array:
    """Return the fraction of each pixel that a mask on the fine grid covers, ``(height, width, 1)``."""
    height, width = mask.shape[0] // _SUPERSAMPLING, mask.shape[1] // _SUPERSAMPLING
    return mask.reshape(height, _SUPERSAMPLING, width, _SUPERSAMPLING).mean(axis=(1, 3))[..., None]


def _tinted(rgb: tuple[int, int, int], generator: np.random.Generator) -> Array:
    return np.array(rgb) + generator.normal(0.0, _TINT, 3)


def _star(u: Array, v: Array) -> Array:
    # By symmetry, fold all angles into half of one star point, whose edge is a straight line.
    sector, inner = 2 * np.pi / 5, 0.45
    angle = np.abs((np.arctan2(u, -v) + sector / 2) % sector - sector / 2)
    distance = np.hypot(u, v)
    edge_x, edge_y = inner * np.cos(sector / 2) - 1.0, inner * np.sin(sector / 2)
    return (distance * np.cos(angle) - 1.0) * edge_y - distance * np.sin(angle) * edge_x <= 0


def _heart(u: Array, v: Array) -> Array:
    x, y = 1.2 * u, 0.12 - 1.2 * v
    return (x**2 + y**2 - 1.0) ** 3 - x**2 * y**3 <= 0


_OUTLINES: dict[str, Callable[[Array, Array], Array]] = {
    "circle": lambda u, v: u**2 + v**2 <= 0.92**2,
    "square": lambda u, v: np.maximum(np.abs(u), np.abs(v)) <= 0.82,
    "triangle": lambda u, v: (v <= 0.75) & (np.abs(u) <= 0.5 * (v + 1.05)),
    "diamond": lambda u, v: np.abs(u) / 0.72 + np.abs(v) <= 1.0,
    "star": _star,
    "cross": lambda u, v: (np.minimum(np.abs(u), np.abs(v)) <= 0.3) & (np.maximum(np.abs(u), np.abs(v)) <= 0.95),
    "heart": _heart,
    "moon": lambda u, v: (u**2 + v**2 <= 1.0) & ((u - 0.5) ** 2 + v**2 > 0.72**2),
}

# Functions that return where an item has its second color. u and v are in pixels, so all items have equally fine patterns.
_PATTERNS: dict[str, Callable[[Array, Array], Array]] = {
    "plain": lambda u, v: np.zeros(u.shape, dtype=bool),
    "striped": lambda u, v: np.sin(2 * np.pi * (u + v) / 4.2) > 0,
    "dotted": lambda u, v: np.cos(2 * np.pi * u / 3.8) + np.cos(2 * np.pi * v / 3.8) > 0.8,
    "checked": lambda u, v: np.sin(np.pi * u / 2.6) * np.sin(np.pi * v / 2.6) > 0,
}


def _plain_ground(rgb: tuple[int, int, int], generator: np.random.Generator) -> Array:
    return np.tile(_tinted(rgb, generator), (IMAGE_SIZE, IMAGE_SIZE, 1))


def _grass(generator: np.random.Generator) -> Array:
    ground = _plain_ground((112, 168, 84), generator)
    # Blades of grass: the brightness changes between columns, but only at every eighth row.
    return ground + generator.normal(0.0, 12.0, (4, IMAGE_SIZE, 1)).repeat(IMAGE_SIZE // 4, axis=0)


def _sand(generator: np.random.Generator) -> Array:
    ground = _plain_ground((222, 198, 148), generator)
    return ground + generator.normal(0.0, 10.0, (IMAGE_SIZE, IMAGE_SIZE, 1))


def _water(generator: np.random.Generator) -> Array:
    phase, length = generator.uniform(0, 2 * np.pi, 2), generator.uniform(9.0, 14.0)
    pixel = np.arange(IMAGE_SIZE)
    height = pixel[:, None] + 1.3 * np.sin(2 * np.pi * pixel[None, :] / length + phase[0])
    waves = np.sin(2 * np.pi * height / 6.0 + phase[1])
    return _plain_ground((104, 166, 210), generator) + 12.0 * waves[..., None]


def _brick(generator: np.random.Generator) -> Array:
    height, width = 5.0, 10.0
    points = _fine(slice(0, IMAGE_SIZE))
    row = (points[:, None] + generator.uniform(0, height)) / height
    column = (points[None, :] + generator.uniform(0, width)) / width + 0.5 * (np.floor(row) % 2)
    mortar = _coverage((row % 1 < 0.2) | (column % 1 < 0.1))
    ground = _plain_ground((170, 98, 80), generator)
    return ground + 0.7 * mortar * (190.0 - ground)


def _stone(generator: np.random.Generator) -> Array:
    blocks = generator.normal(0.0, 12.0, (8, 8, 1)).repeat(IMAGE_SIZE // 8, axis=0).repeat(IMAGE_SIZE // 8, axis=1)
    return _plain_ground((142, 142, 144), generator) + blocks


_BACKGROUNDS: dict[str, Callable[[np.random.Generator], Array]] = {
    "grass": _grass,
    "sand": _sand,
    "water": _water,
    "snow": lambda generator: _plain_ground((226, 232, 238), generator),
    "brick": _brick,
    "stone": _stone,
}
