"""Compute paired differences between two losses, with intervals over both seeds and validation samples."""

import math
import statistics
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import torch
from scipy import special
from torch import Tensor

from openclip_ext.state.sharded_table import merge_labels

_CONFIDENCE = 0.95


@dataclass(frozen=True)
class Difference:
    """The mean of paired differences over seeds and samples, and its 95 % interval over both."""

    mean: float
    low: float
    high: float
    seeds: int


def seeds_interval(differences: Sequence[float]) -> tuple[float, float]:
    """Return the 95 % interval of the mean, by Student's t. ``differences`` has one value per seed, at least two values."""
    mean = statistics.fmean(differences)
    half = student_t(len(differences) - 1) * statistics.stdev(differences) / math.sqrt(len(differences))
    return mean - half, mean + half


def format_bound(value: float) -> str:
    """Format a bound of an interval with one decimal, or two if 0.0 would hide on which side of 0 the bound is."""
    text = f"{value:.1f}"
    return text if float(text) else f"{value:.2f}"


def paired_difference(first: Tensor, second: Tensor, groups: Sequence[int]) -> Difference | None:
    """Compute the difference between two losses' scores ``(S, N)`` for the same ``S`` seeds and ``N`` samples.

    The interval combines two independent sources of variation, each by Student's t: seeds, and groups of samples that are
    right or wrong together (:func:`linked_groups`). Returns None for fewer than two seeds or groups.
    """
    difference = (first - second).double()
    seeds = len(difference)
    samples_half = half_width(difference.mean(dim=0), groups)
    if seeds < 2 or samples_half is None:
        return None
    mean = float(difference.mean())
    low, high = seeds_interval(difference.mean(dim=1).tolist())
    half = math.hypot((high - low) / 2, samples_half)
    return Difference(mean, mean - half, mean + half, seeds)


def linked_groups(*names: Sequence[Hashable]) -> list[int]:
    """Return a group number for each sample. Samples that share a name, directly or through other samples, have equal numbers.

    Each of ``names`` has a name of every sample: its image, its caption.
    """
    columns = []
    for of in names:
        number = {name: place for place, name in enumerate(dict.fromkeys(of))}
        columns.append(torch.tensor([number[name] for name in of]))
    return merge_labels(torch.stack(columns, dim=1)).tolist()


def half_width(values: Tensor, groups: Sequence[int]) -> float | None:
    """Return half the width of the 95 % interval for the mean of grouped values ``(N,)``; None if there is only one group."""
    place = torch.as_tensor(groups).unique(return_inverse=True)[1]
    count = int(place.max()) + 1
    if count < 2:
        return None
    sums = torch.zeros(count, dtype=torch.float64).index_add_(0, place, values.double() - values.double().mean())
    return student_t(count - 1) * math.sqrt(float(sums.square().sum()) * count / (count - 1)) / len(values)


def student_t(freedom: int) -> float:
    """Return half the width of the central 95 % interval of Student's t with ``freedom`` degrees of freedom."""
    return float(special.stdtrit(freedom, (1 + _CONFIDENCE) / 2))  # scipy.stats takes seconds to import
