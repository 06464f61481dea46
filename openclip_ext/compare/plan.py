"""Choose the number of candidates, the length of runs and the next stage, from the time and the measured throughput."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

SEEDS = (0, 1, 2)
# Maximum number of seeds if there is time left.
MOST_SEEDS = 6
# Settings of each loss that enter the next stage, which chooses among them. In docs/benchmarks/icons, the best setting was
# among the two best at a quarter of the runs in 83 % of 46 cases.
FINALISTS = 2
# Losses besides the baseline that enter the next stage.
CONTENDERS = 2
# The first stage leaves time for runs longer by the first factor; a new stage must be longer by the second.
_PLANNED_LONGER, _LONGER = 2.5, 1.5
# Shorter runs are hardly above chance.
_LEAST_STEPS = 20
# Candidates of each loss in the first stage, and the steps that its runs need for that, or --epochs. Long runs matter more
# than many candidates: on icons, queueclip's gain grew from 0.1 points after 1,700 steps to 8.7 after 5,500
# (docs/experiments/batch-sizes.md).
_TRIED = ((9, math.inf), (4, 1000), (3, 600), (FINALISTS, _LEAST_STEPS))
# For each loss: a run of every finalist, and the other seeds of the best one.
_STAGE_RUNS = FINALISTS + len(SEEDS) - 1


@dataclass(frozen=True)
class Costs:
    """Seconds of training on a sample by loss, and of the rest of a run, with all processes busy."""

    per_sample: Mapping[str, float]
    per_run: float

    def fitting(self, seconds: float, runs: int) -> float:
        """Return the samples of a run if one process performs ``runs`` runs of each loss in this time."""
        return (seconds / runs - len(self.per_sample) * self.per_run) / sum(self.per_sample.values())


@dataclass(frozen=True)
class Stage:
    """A stage of runs of equal length: samples of each run, and seeds."""

    samples: int
    seeds: Sequence[int]


def plan_tuning(
    costs: Costs, seconds: float, processes: int, batch: int, most_samples: int, most_tried: int
) -> tuple[int, Stage]:
    """Plan the first stage for ``seconds``; return the number of candidates of each loss, up to ``most_tried``, and the stage.

    It has one seed, or all seeds if there is nothing to choose for a second stage.
    """
    losses = len(costs.per_sample)
    for most, enough_steps in _TRIED:
        tried = min(most, most_tried)
        runs, share = _first_stage(tried, losses)
        seeds = SEEDS if share == 1 else SEEDS[:1]
        steps = int(min(costs.fitting(share * seconds * processes, runs), most_samples) // batch)
        if steps >= enough_steps or steps == most_samples // batch:
            return tried, Stage(steps * batch, seeds)
    raise ValueError(
        f"the time is too short: {max(0, seconds) / 60:.1f} minutes, after reading and measuring, leave {max(0, steps)} steps "
        f"for a run, expected at least {_LEAST_STEPS}. Use more --minutes, fewer --losses, or a smaller --model"
    )


def _first_stage(tried: int, losses: int) -> tuple[int, float]:
    """Return the runs of each loss in the first stage and its share of the time: 1 if a second has nothing to choose."""
    if tried <= FINALISTS and losses <= 1 + CONTENDERS:
        return _STAGE_RUNS, 1.0
    later = _STAGE_RUNS * min(losses, 1 + CONTENDERS)
    return tried, tried * losses / (tried * losses + _PLANNED_LONGER * later)


def least_seconds(per_sample: float, losses: int, processes: int, batch: int) -> float:
    """Return the seconds of the shortest comparison, if training on a sample takes ``per_sample``."""
    runs, share = _first_stage(FINALISTS, losses)
    return _LEAST_STEPS * batch * per_sample * losses * runs / (processes * share)


def plan_next(last: Stage, costs: Costs, seconds: float, processes: int, batch: int, most_samples: int) -> Stage | None:
    """Plan the next stage with the costs of its losses: longer runs if the time allows, else more seeds, else None."""
    fitting = costs.fitting(seconds * processes, _STAGE_RUNS)
    longer = int(min(fitting, most_samples) // batch) * batch
    if longer >= _LONGER * last.samples:
        return Stage(longer, SEEDS)
    if len(last.seeds) == 1:
        return replace(last, seeds=SEEDS)
    # A round of runs lasts as long as its slowest run.
    rounds = math.ceil(len(costs.per_sample) / processes)
    run_seconds = costs.per_run + last.samples * max(costs.per_sample.values())
    if len(last.seeds) >= MOST_SEEDS or rounds * run_seconds > seconds:
        return None
    return replace(last, seeds=(*last.seeds, max(last.seeds) + 1))


def equal_epochs(samples: int, batch: int, num_samples: int) -> tuple[int, int]:
    """Divide a length into equal epochs of full steps, up to the data set's size; return their number and samples of each."""
    longest, steps = num_samples // batch, samples // batch
    # One of the two is close to the requested length.
    counts = (max(1, steps // longest), math.ceil(steps / longest))
    epochs = max(counts, key=lambda count: count * min(longest, steps // count))
    return epochs, min(longest, steps // epochs) * batch
