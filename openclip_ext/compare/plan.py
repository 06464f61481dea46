"""Decide how many candidates are tried, how long the runs are and what comes next, from the time and the measured pace."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

SEEDS = (0, 1, 2)
# Number of seeds if there is time to spare.
MOST_SEEDS = 6
# Settings of each loss that reach the next stage, whose first seed chooses among them, because short runs do not tell the best
# from the second. In docs/benchmarks/icons the best setting was among the two best at a quarter of the runs in 83 % of 46
# cases; the better of these two was 0.1 points behind it on average.
FINALISTS = 2
# Losses besides the baseline that reach the next stage; keeping a loss that is clearly behind would only shorten the runs.
CONTENDERS = 2
# The first stage leaves time for runs that are longer by the first factor; a new stage must be longer by the second.
_PLANNED_LONGER, _LONGER = 2.5, 1.5
# Shorter runs are hardly above chance.
_LEAST_STEPS = 20
# Number of candidates of each loss that the first stage tries, and the steps that its runs must have for that; runs as long as
# --epochs are enough, too. Long runs matter more than many candidates: on icons in batches of 32, queueclip was 0.1 and 0.8
# points ahead after 1,700 steps, 2.4 after 3,000 and 8.7 after 5,500 (docs/experiments/batch-sizes.md).
_TRIED = ((9, math.inf), (4, 1000), (3, 600), (FINALISTS, _LEAST_STEPS))
# For each loss: a run of every finalist, and the other seeds of the best one.
_RUNS_OF_A_STAGE = FINALISTS + len(SEEDS) - 1


@dataclass(frozen=True)
class Costs:
    """Holds costs in seconds, measured on this machine with all processes busy.

    A loss takes ``per_sample`` for training on a sample, and a run ``per_run`` for everything else.
    """

    per_sample: Mapping[str, float]
    per_run: float

    def fitting(self, seconds: float, runs: int) -> float:
        """Return the samples that each run can see if one process performs ``runs`` runs of each loss in this time."""
        return (seconds / runs - len(self.per_sample) * self.per_run) / sum(self.per_sample.values())


@dataclass(frozen=True)
class Stage:
    """Describes runs of one length: the samples that each run sees, and the seeds."""

    samples: int
    seeds: Sequence[int]


def plan_tuning(
    costs: Costs, seconds: float, processes: int, batch: int, most_samples: int, most_tried: int
) -> tuple[int, Stage]:
    """Plan the first stage; return how many candidates of each loss it tries, at most ``most_tried``, and the stage.

    It has one seed, or all seeds if there is nothing to choose for a second stage. ``seconds`` is the wall-clock time of the
    whole comparison.
    """
    losses = len(costs.per_sample)
    later = _RUNS_OF_A_STAGE * min(losses, 1 + CONTENDERS)
    for most, enough_steps in _TRIED:
        tried = min(most, most_tried)
        decides = tried <= FINALISTS and losses <= 1 + CONTENDERS  # nothing to choose for a second stage
        runs, seeds = (_RUNS_OF_A_STAGE, SEEDS) if decides else (tried, SEEDS[:1])
        share = 1.0 if decides else tried * losses / (tried * losses + _PLANNED_LONGER * later)
        steps = int(min(costs.fitting(share * seconds * processes, runs), most_samples) // batch)
        if steps >= enough_steps or steps == most_samples // batch:
            return tried, Stage(steps * batch, seeds)
    raise ValueError(
        f"the time is too short: {max(0, seconds) / 60:.1f} minutes, after reading and measuring, with {processes} processes "
        f"leave {max(0, steps)} steps for a first run of each of {len(costs.per_sample)} losses, at least {_LEAST_STEPS} "
        "are needed. Give more --minutes, fewer --losses, or a smaller --model"
    )


def least_seconds(per_sample: float, losses: int, processes: int, batch: int) -> float:
    """Return the seconds that the shortest comparison takes, if training on a sample takes ``per_sample``."""
    decides = losses <= 1 + CONTENDERS
    runs = _RUNS_OF_A_STAGE if decides else FINALISTS
    later = _RUNS_OF_A_STAGE * min(losses, 1 + CONTENDERS)
    share = 1.0 if decides else runs * losses / (runs * losses + _PLANNED_LONGER * later)
    return _LEAST_STEPS * batch * per_sample * losses * runs / (processes * share)


def plan_next(last: Stage, costs: Costs, seconds: float, processes: int, batch: int, most_samples: int) -> Stage | None:
    """Plan what follows a finished stage: longer runs if the time allows, else more seeds, else None.

    ``costs`` are the measured costs of the losses that reach the next stage.
    """
    fitting = costs.fitting(seconds * processes, _RUNS_OF_A_STAGE)
    longer = int(min(fitting, most_samples) // batch) * batch
    if longer >= _LONGER * last.samples:
        return Stage(longer, SEEDS)
    if len(last.seeds) == 1:
        return replace(last, seeds=SEEDS)
    # A round of runs lasts as long as its slowest one.
    rounds = math.ceil(len(costs.per_sample) / processes)
    run_seconds = costs.per_run + last.samples * max(costs.per_sample.values())
    if len(last.seeds) >= MOST_SEEDS or rounds * run_seconds > seconds:
        return None
    return replace(last, seeds=(*last.seeds, max(last.seeds) + 1))


def equal_epochs(samples: int, batch: int, num_samples: int) -> tuple[int, int]:
    """Divide a length into equal epochs of whole steps, none longer than the data set; a remainder may be left out.

    Returns the number of epochs, and the samples of each.
    """
    longest, steps = num_samples // batch, samples // batch
    # One of the two comes close to the requested length.
    counts = (max(1, steps // longest), math.ceil(steps / longest))
    epochs = max(counts, key=lambda count: count * min(longest, steps // count))
    return epochs, min(longest, steps // epochs) * batch
