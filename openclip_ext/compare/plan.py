"""Choose the number of candidates, the length of runs, and the next rung from the available time and the throughput."""

import bisect
import heapq
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from openclip_ext.compare.trials import Rung

# Fraction of --minutes that is reserved for runs that are slower than planned.
RESERVE = 0.1
SEEDS = (0, 1, 2)
# Maximum number of seeds. More than three are only used if time is left.
MOST_SEEDS = 6
# Number of settings per loss that enter the next rung. In 83 % of 46 cases in docs/benchmarks/icons, the setting
# that was best at the end was among the best two after a quarter of the training.
FINALISTS = 2
# Number of losses that enter the next rung, in addition to the baseline.
CONTENDERS = 2
# Ratios between the run lengths of successive rungs: the ratio that the first rung plans for, and the minimum ratio.
_PLANNED_LONGER, _LONGER = 2.5, 1.5
# Minimum number of steps of a run. The results of shorter runs are hardly better than chance.
_LEAST_STEPS = 20
# Each pair has a number of candidates per loss in the first rung, and the minimum steps per run for it (fewer if --epochs
# is shorter). Long runs matter more than many candidates: on the icons data, queueclip's gain grew from 0.1 points after
# 1,700 steps to 8.7 points after 5,500 steps (docs/experiments/batch-sizes.md).
_TRIED = ((9, math.inf), (4, 1000), (3, 600), (FINALISTS, _LEAST_STEPS))


@dataclass(frozen=True)
class Costs:
    """Costs while all processes are busy: training seconds per sample of each loss, and fixed seconds per run."""

    per_sample: Mapping[str, float]
    per_run: float

    def duration(self, samples: float, processes: int, tried: int, seeds: int) -> float:
        """Return the duration in seconds of a rung: of each loss, ``tried`` runs, then the best run with the other seeds."""
        run_seconds = {loss: self.per_run + samples * rate for loss, rate in self.per_sample.items()}
        free = [0.0] * processes  # a heap of the times at which the processes are free
        chosen = dict.fromkeys(run_seconds, 0.0)  # the times at which the best runs are known
        for loss in [*run_seconds] * tried:
            end = free[0] + run_seconds[loss]
            heapq.heapreplace(free, end)
            chosen[loss] = max(chosen[loss], end)
        for loss in sorted([*run_seconds] * (seeds - 1), key=chosen.__getitem__):
            heapq.heapreplace(free, max(free[0], chosen[loss]) + run_seconds[loss])
        return max(free)

    def fitting(self, seconds: float, batch: int, most_samples: int, processes: int, tried: int, seeds: int) -> int:
        """Return the largest number of steps per run, at most ``most_samples // batch``, of a rung that takes ``seconds``."""
        steps = range(1, most_samples // batch + 1)
        return bisect.bisect(steps, seconds, key=lambda steps: self.duration(steps * batch, processes, tried, seeds))


def plan_first(
    costs: Costs, seconds: float, processes: int, batch: int, most_samples: int, most_tried: int, minutes: float
) -> tuple[int, Rung]:
    """Plan the first rung of a comparison that takes ``seconds``; return the number of candidates per loss and the rung.

    There are up to ``most_tried`` candidates. The rung has one seed, or all seeds if there are so few candidates that no
    second rung is needed. If the time is too short, raise ValueError, which compares ``minutes`` with the
    necessary time.
    """
    for most, enough_steps in _TRIED:
        tried = min(most, most_tried)
        share, seeds = _first_rung(tried, costs, processes)
        steps = costs.fitting(share * seconds, batch, most_samples, processes, tried, len(seeds))
        if steps >= enough_steps or steps == most_samples // batch:
            return tried, Rung(steps * batch, seeds)
    least_samples = min(enough_steps, most_samples // batch) * batch
    needed = costs.duration(least_samples, processes, tried, len(seeds)) / share
    least = math.ceil(minutes + (needed - seconds) / (1 - RESERVE) / 60)
    raise ValueError(
        f"--minutes {minutes:g} is too short: runs of {len(costs.per_sample)} losses need at least {needed / 60:.1f} minutes, "
        f"but only {max(0, seconds) / 60:.1f} are left for them. Give at least --minutes {least} (better {2 * least}), fewer "
        "--losses or a smaller --model"
    )


def _first_rung(tried: int, costs: Costs, processes: int) -> tuple[float, Sequence[int]]:
    """Return the first rung's fraction of the time, and its seeds.

    The fraction is 1 if there are so few candidates that no second rung is needed.
    """
    if tried <= FINALISTS and len(costs.per_sample) <= 1 + CONTENDERS:
        return 1.0, SEEDS
    first = costs.duration(1, processes, tried, 1)
    baseline, *others = costs.per_sample.items()  # the most costly losses may win
    last = replace(costs, per_sample=dict([baseline, *sorted(others, key=lambda cost: -cost[1])[:CONTENDERS]]))
    return first / (first + _PLANNED_LONGER * last.duration(1, processes, FINALISTS, len(SEEDS))), SEEDS[:1]


def plan_next(last: Rung, costs: Costs, seconds: float, processes: int, batch: int, most_samples: int) -> Rung | None:
    """Plan the next rung: longer runs or, if the time is too short, more seeds. Return None without time for either."""
    longer = costs.fitting(seconds, batch, most_samples, processes, FINALISTS, len(SEEDS)) * batch
    if longer >= _LONGER * last.samples:
        return Rung(longer, SEEDS)
    if len(last.seeds) == 1:
        return replace(last, seeds=SEEDS)
    # All processes work in rounds, and a round lasts as long as its slowest run.
    rounds = math.ceil(len(costs.per_sample) / processes)
    run_seconds = costs.per_run + last.samples * max(costs.per_sample.values())
    if len(last.seeds) >= MOST_SEEDS or rounds * run_seconds > seconds:
        return None
    return replace(last, seeds=(*last.seeds, max(last.seeds) + 1))


def equal_epochs(samples: int, batch: int, num_samples: int) -> tuple[int, int]:
    """Divide ``samples`` into equal epochs of full batches; return the number of epochs and the samples per epoch.

    An epoch has at most ``num_samples`` samples.
    """
    longest, steps = num_samples // batch, samples // batch
    # At least one of these two numbers of epochs gives about the requested length.
    counts = (max(1, steps // longest), math.ceil(steps / longest))
    epochs = max(counts, key=lambda count: count * min(longest, steps // count))
    return epochs, min(longest, steps // epochs) * batch
