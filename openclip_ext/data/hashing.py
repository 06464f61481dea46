"""A counter-based hash: the only source of randomness in the training loader.

Sample orders, augmentations and sampled captions depend only on the hash of numbers such as (seed, epoch, index). The hash
needs no state, works on arrays, and has the same values with every numpy version.
"""

import hashlib
from enum import IntEnum
from typing import Any

import numpy as np

_MASK = (1 << 64) - 1


class Purpose(IntEnum):
    """A use of random bits, and the first input of :func:`hash64`: each use of a seed gets different random bits."""

    SEQUENCE = 1
    ROTATION = 2
    SHUFFLE = 3
    PIXELS = 4
    RESAMPLING = 6
    CAPTION = 7
    SINGLE_SOURCE = 8
    HARD_NEGATIVE = 9
    REPLACEMENT = 10
    HELD_OUT = 11
    SENTENCE = 12


def hash64(purpose: Purpose, *words: int | np.ndarray) -> np.ndarray:
    """Hash integers to 64-bit random words; return a ``uint64`` array of the broadcast shape, at least 1-d.

    Args:
        purpose: What the random bits are used for.
        *words: Integer arrays, or Python integers of any size and sign (taken modulo 2^64). They are broadcast together.
    """
    unsigned = (word.astype(np.uint64) if isinstance(word, np.ndarray) else int(word) & _MASK for word in words)
    return _hash(np.full(1, int(purpose), dtype=np.uint64), *unsigned)


def hash_int(purpose: Purpose, *words: int) -> int:
    """Return the value of :func:`hash64` for Python integers, as a Python integer."""
    return _hash(int(purpose), *(word & _MASK for word in words))


def _hash(state: Any, *words: Any) -> Any:
    for word in words:
        state = _scramble(((state ^ word) + 0x9E3779B97F4A7C15) & _MASK)
    return _scramble(state)


def _scramble(x: Any) -> Any:
    """Apply the finalizer of SplitMix64 (Steele, Lea and Flood, 2014), a bijection of 64-bit words."""
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)


def hash_text(text: str) -> int:
    """Hash a text with :func:`hash_bytes`."""
    return hash_bytes(text.encode())


def hash_bytes(content: bytes) -> int:
    """Hash bytes to a signed 64-bit integer. The result does not change between processes or versions."""
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little", signed=True)


def uniform(bits: np.ndarray) -> np.ndarray:
    """Turn an array of 64-bit random words into float64 numbers in [0, 1)."""
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53


def permutation(bits: np.ndarray) -> np.ndarray:
    """Return the permutation (``int64``) that sorts the given random bits."""
    return np.argsort(bits, kind="stable")
