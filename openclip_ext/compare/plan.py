"""Choose the number of candidates, the length of runs, and the next stage from the available time and the throughput."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

# Fraction of --minutes that is reserved for runs that are slower than planned.
RESERVE = 0.1
SEEDS = (0, 1, 2)
# Maximum number of seeds. More than three are only used if time is left.
MOST_SEEDS = 6
# Number of settings per loss that enter the next stage. In 83 % of 46 cases in docs/benchmarks/icons, the setting
# that was best at the end was among the best two after a quarter of the training.
FINALISTS = 2
# Number of losses that enter the next stage, in addition to the baseline.
CONTENDERS = 2
# Ratios between the run lengths of successive stages: the ratio that the first stage plans for, and the minimum ratio.
_PLANNED_LONGER, _LONGER = 2.5, 1.5
# Minimum number of steps of a run. The results of shorter runs are hardly better than chance.
_LEAST_STEPS = 20
# Each pair has a number of candidates per loss in the first stage, and the minimum steps per run for it (fewer if --epochs
# is shorter). Long runs matter more than many candidates: on the icons data, queueclip's gain grew from 0.1 points after
# 1,700 steps to 8.7 points after 5,500 steps (docs/experiments/batch-sizes.md).
_TRIED = ((9, math.inf), (4, 1000), (3, 600), (FINALISTS, _LEAST_STEPS))
# Number of runs per loss in a later stage: one run of every finalist, and the other seeds of the best finalist.
_STAGE_RUNS = FINALISTS + len(SEEDS) - 1


@dataclass(frozen=True)
class Costs:
    """Costs while all processes are busy: training seconds per sample of each loss, and other seconds per run."""

    per_sample: Mapping[str, float]
    per_run: float

    def fitting(self, seconds: float, runs: int) -> float:
        """Return the samples per run if one process performs ``runs`` runs of each loss in ``seconds``."""
        return (seconds / runs - len(self.per_sample) * self.per_run) / sum(self.per_sample.values())


@dataclass(frozen=True)
class Stage:
    """A stage of runs of equal length: the number of samples per run, and the seeds."""

    samples: int
    seeds: Sequence[int]


def plan_tuning(
    costs: Costs, seconds: float, processes: int, batch: int, most_samples: int, most_tried: int, minutes: float
) -> tuple[int, Stage]:
    """Plan the first stage of a comparison that takes ``seconds``; return the number of candidates per loss and the stage.

    There are up to ``most_tried`` candidates. The stage has one seed, or all seeds if there are so few candidates that no
    second stage is needed. If the time is too short, raise ValueError, which compares ``minutes`` with the
    necessary time.
    """
    losses = len(costs.per_sample)
    for most, enough_steps in _TRIED:
        tried = min(most, most_tried)
        runs, share = _first_stage(tried, losses)
        seeds = SEEDS if share == 1 else SEEDS[:1]
        steps = int(min(costs.fitting(share * seconds * processes, runs), most_samples) // batch)
        if steps >= enough_steps or steps == most_samples // batch:
            return tried, Stage(steps * batch, seeds)
    needed = least_seconds(costs, processes, batch, min(enough_steps, most_samples // batch), tried)
    raise too_short(costs, needed, seconds, minutes)


def _first_stage(tried: int, losses: int) -> tuple[int, float]:
    """Return the number of runs per loss in the first stage, and the stage's fraction of the time.

    The fraction is 1 if there are so few candidates that no second stage is needed.
    """
    if tried <= FINALISTS and losses <= 1 + CONTENDERS:
        return _STAGE_RUNS, 1.0
    later = _STAGE_RUNS * min(losses, 1 + CONTENDERS)
    return tried, tried * losses / (tried * losses + _PLANNED_LONGER * later)


def least_seconds(
    costs: Costs, processes: int, batch: int, steps: float = _LEAST_STEPS, tried: int = FINALISTS
) -> float:
    """Return the duration in seconds of the shortest comparison: runs of ``steps`` steps, ``tried`` candidates per loss."""
    losses = len(costs.per_sample)
    runs, share = _first_stage(tried, losses)
    return runs * (steps * batch * sum(costs.per_sample.values()) + losses * costs.per_run) / (processes * share)


def too_short(costs: Costs, needed: float, seconds: float, minutes: float) -> ValueError:
    """Return the error for a comparison of ``minutes`` that leaves ``seconds`` for its runs, less than ``needed``."""
    least = math.ceil(minutes + (needed - seconds) / (1 - RESERVE) / 60)
    return ValueError(
        f"--minutes {minutes:g} is too short: runs of {len(costs.per_sample)} losses need at least {needed / 60:.1f} minutes, "
        f"but only {max(0, seconds) / 60:.1f} are left for them. Give at least --minutes {least} (better {2 * least}), fewer "
        "--losses or a smaller --model"
    )


def plan_next(last: Stage, costs: Costs, seconds: float, processes: int, batch: int, most_samples: int) -> Stage | None:
    """Plan the next stage: longer runs or, if the time is too short, more seeds. Return None without time for either."""
    fitting = costs.fitting(seconds * processes, _STAGE_RUNS)
    longer = int(min(fitting, most_samples) // batch) * batch
    if longer >= _LONGER * last.samples:
        return Stage(longer, SEEDS)
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
