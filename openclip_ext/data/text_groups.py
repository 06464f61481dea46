"""Divide the texts of a batch into groups of similar length, so that a causal text tower computes less padding.

A causal tower that pools at the end-of-text token ignores all later positions. OpenCLIP computes them, although a caption
fills 8 to 30 of 77 positions. ``openclip_ext.evaluation.text_tower`` encodes the groups.
"""

import itertools
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

# The lengths of groups are multiples of this many tokens, to limit the number of tensor shapes.
LENGTH_STEP = 8
# For compiled models, fewer lengths occur, because each length is compiled.
COMPILED_LENGTH_STEP = 16


class TextGroups(NamedTuple):
    """The texts of a batch, grouped by length.

    Attributes:
        tokens: For each group, the first tokens of its texts: ``(rows, length)`` int64, as many as the longest text has, or
            slightly more. The groups together contain every text once.
        places: ``(B,)`` int64, the position of each text of the batch in the concatenation of the groups.
        num_tokens: Number of tokens of all texts, without padding.
    """

    tokens: tuple[Tensor, ...]
    places: Tensor
    num_tokens: int

    @property
    def num_positions(self) -> int:
        """Number of positions that the tower computes: tokens and padding."""
        return sum(part.numel() for part in self.tokens)


def texts_of(batch: Mapping[str, Any]) -> Tensor:
    """Return all texts of a batch that the model encodes ``(N, L)``: the captions, then the hard negatives."""
    parts = [batch[name] for name in ("text", "hard_negative") if name in batch]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def group_texts(tokens: Tensor, most: int, of_equal_size: bool = False) -> TextGroups:
    """Divide the texts ``tokens`` ``(B, L)`` int64 into at most ``most`` groups, so that the fewest positions are computed.

    The end-of-text token has the largest number, as in OpenCLIP's towers. If ``of_equal_size`` is true, all groups have the
    same number of texts and few lengths occur, so the groups have a small set of shapes. A compiled model needs this.
    """
    lengths = text_lengths(tokens).numpy()
    order = np.argsort(lengths, kind="stable")
    step = COMPILED_LENGTH_STEP if of_equal_size else LENGTH_STEP
    padded = np.minimum(-(-lengths[order] // step) * step, tokens.shape[1])
    ends = _equal_ends(len(order), most) if of_equal_size else _cheapest_ends(padded, most)
    places = np.empty_like(order)
    places[order] = np.arange(len(order))
    starts = (0, *ends[:-1])
    groups = (
        tokens[torch.from_numpy(order[start:end]), : padded[end - 1]] for start, end in zip(starts, ends, strict=True)
    )
    return TextGroups(tuple(groups), torch.from_numpy(places), int(lengths.sum()))


def text_lengths(tokens: Tensor) -> Tensor:
    """Return the number of tokens in each text without padding: ``(B, L)`` int64 -> ``(B,)`` int64."""
    return tokens.argmax(dim=-1) + 1


def _cheapest_ends(padded: np.ndarray, most: int) -> tuple[int, ...]:
    """Return the ends of up to ``most`` groups of texts with ascending lengths ``padded``, for the fewest positions."""
    levels, firsts = np.unique(padded, return_index=True)
    level_ends = [*firsts[1:].tolist(), len(padded)]

    def positions(last_levels: tuple[int, ...]) -> int:
        ends = [level_ends[level] for level in last_levels]
        return sum(
            (end - start) * int(levels[level])
            for start, end, level in zip((0, *ends[:-1]), ends, last_levels, strict=True)
        )

    last = len(levels) - 1
    choices = itertools.combinations(range(last), min(most, len(levels)) - 1)
    best = min(((*chosen, last) for chosen in choices), key=positions)
    return tuple(level_ends[level] for level in best)


def _equal_ends(rows: int, most: int) -> tuple[int, ...]:
    groups = next(number for number in range(min(most, rows), 0, -1) if rows % number == 0)
    size = rows // groups
    return tuple(range(size, rows + 1, size))
