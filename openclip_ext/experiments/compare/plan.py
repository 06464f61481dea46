"""How many candidates are tried, how long the runs are, and what comes next, from the time and the measured pace."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

SEEDS = (0, 1, 2)
# With time to spare.
MOST_SEEDS = 6
# Settings of each loss that go on to the next stage, whose first seed chooses among them: short runs do not tell the best from
# the second. On docs/benchmarks/icons the best of all was among the two best at a quarter of the runs in 83 % of 46 cases; the
# better of these two was 0.1 points behind it in the mean.
FINALISTS = 2
# Losses beside the baseline that go on: what is clearly behind after the first stage only makes the runs shorter.
CONTENDERS = 2
# The first stage leaves time for runs so many times as long as its own; any new stage must be at least so much longer.
_PLANNED_LONGER, _LONGER = 2.5, 1.5
# Shorter runs say nothing: they are hardly above chance.
_LEAST_STEPS = 20
# Candidates of each loss that the first stage tries, and the steps that its runs must have for that; runs as long as --epochs
# are enough, too. Long runs come before many candidates: on icons in batches of 32 queueclip was 0.1 and 0.8 points ahead
# after 1,700 steps, 2.4 after 3,000 and 8.7 after 5,500 (docs/experiments/batch-sizes.md).
_TRIED = ((9, math.inf), (4, 1000), (3, 600), (FINALISTS, _LEAST_STEPS))
# Of each loss: those that choose, and the other seeds of the best.
_RUNS_OF_A_STAGE = FINALISTS + len(SEEDS) - 1


@dataclass(frozen=True)
class Costs:
    """Seconds, measured on this machine with all processes busy.

    Attributes:
        per_sample: of training for each sample, by loss.
        per_run: of a run beside its training.
    """

    per_sample: Mapping[str, float]
    per_run: float

    def fitting(self, seconds: float, runs: int) -> float:
        """Return the samples of each run, if one process does so many of each loss in this time."""
        return (seconds / runs - len(self.per_sample) * self.per_run) / sum(self.per_sample.values())


@dataclass(frozen=True)
class Stage:
    """Runs of one length: the samples that each sees, and the seeds."""

    samples: int
    seeds: Sequence[int]


def plan_tuning(
    costs: Costs, seconds: float, processes: int, batch: int, most_samples: int, most_tried: int
) -> tuple[int, Stage]:
    """Return how many candidates of each loss are tried, at most ``most_tried``, and the first stage.

    It has one seed, and all seeds where there is nothing to choose for a second stage. ``seconds`` are of wall-clock time, for
    the whole comparison.

    Raises:
        ValueError: not even the smallest fits.
    """
    losses = len(costs.per_sample)
    later = _RUNS_OF_A_STAGE * min(losses, 1 + CONTENDERS)
    for most, enough_steps in _TRIED:
        tried = min(most, most_tried)
        decides = tried <= FINALISTS and losses <= 1 + CONTENDERS  # there is nothing to choose beforehand
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


def plan_next(last: Stage, costs: Costs, seconds: float, processes: int, batch: int, most_samples: int) -> Stage | None:
    """Return what follows a stage that is finished: longer runs where the time allows, else more seeds, else None.

    ``costs`` are those of the losses that go on, as their runs were measured.
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
    """Divide a length into epochs, none longer than the data set; whole steps and equal epochs may leave out a rest.

    Returns:
        Number of epochs, and the samples of each.
    """
    longest, steps = num_samples // batch, samples // batch
    # One of the two comes close to the number that was asked.
    counts = (max(1, steps // longest), math.ceil(steps / longest))
    epochs = max(counts, key=lambda count: count * min(longest, steps // count))
    return epochs, min(longest, steps // epochs) * batch
