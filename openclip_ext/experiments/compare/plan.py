"""How many candidates are tried and how long the runs are, from the time and the measured pace."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from openclip_ext.experiments.compare.space import BASELINE

SEEDS = (0, 1, 2)
# With time to spare.
MOST_SEEDS = 6
# Candidates of each loss that all seeds run: one run does not tell the best from the second.
FINALISTS = 2
# Losses beside the baseline that run all seeds: what is clearly behind after the first one only makes the runs shorter.
CONTENDERS = 2
# Shorter runs say nothing: they are hardly above chance.
_LEAST_STEPS = 20
# Candidates of each loss that the first seed tries, and the steps that its runs must have for that; runs as long as --epochs
# are enough, too. Long runs come before many candidates: on icons in batches of 32 queueclip was 0.1 and 0.8 points ahead
# after 1,700 steps, 2.4 after 3,000 and 8.7 after 5,500 (docs/results.md).
_TRIED = ((9, math.inf), (4, 2500), (3, 1500), (FINALISTS, _LEAST_STEPS))


@dataclass(frozen=True)
class Costs:
    """Seconds, measured on this machine with all processes busy.

    Attributes:
        per_sample: of training for each sample, by loss.
        per_run: of a run beside its training.
    """

    per_sample: Mapping[str, float]
    per_run: float


@dataclass(frozen=True)
class Design:
    """The size of a comparison.

    Attributes:
        tried: candidates of each loss that run the first seed.
        finalists: the best of these, which run the other seeds, too.
        samples: that each run sees.
        seeds: of the runs.
    """

    tried: int
    finalists: int
    samples: int
    seeds: Sequence[int] = SEEDS

    def runs_a_seed(self, losses: Sequence[str]) -> int:
        """Return the runs of each seed but the first."""
        return self.finalists * min(len(losses), 1 + CONTENDERS)

    def runs(self, losses: Sequence[str]) -> int:
        """Return the runs of the whole comparison."""
        return self.tried * len(losses) + (len(self.seeds) - 1) * self.runs_a_seed(losses)


def make_design(
    losses: Sequence[str], costs: Costs, seconds: float, processes: int, batch: int, most_samples: int, most_tried: int
) -> Design:
    """Return the design that fits into the time.

    Args:
        losses: which are compared.
        costs: of a run.
        seconds: of wall-clock time.
        processes: runs at a time.
        batch: samples of an optimizer step.
        most_samples: that a run may see.
        most_tried: candidates that each loss has.

    Raises:
        ValueError: not even the smallest fits.
    """
    # The costliest losses may be the ones that go on.
    others = sorted((costs.per_sample[loss] for loss in losses if loss != BASELINE), reverse=True)
    all_losses, going_on = (costs.per_sample[BASELINE] + sum(some) for some in (others, others[:CONTENDERS]))
    for tried, enough_steps in _TRIED:
        design = Design(min(tried, most_tried), min(FINALISTS, most_tried), 0)
        per_sample = design.tried * all_losses + (len(SEEDS) - 1) * design.finalists * going_on
        fitting = (seconds * processes - design.runs(losses) * costs.per_run) / per_sample
        steps = int(min(fitting, most_samples) // batch)
        if steps >= enough_steps or steps == most_samples // batch:
            return replace(design, samples=steps * batch)
    raise ValueError(
        f"the time is too short: {max(0, seconds) / 60:.1f} minutes, after reading and measuring, with {processes} processes "
        f"leave {max(0, steps)} steps for a run of each of {len(losses)} losses, at least {_LEAST_STEPS} "
        "are needed. Give more --minutes, fewer --losses, or a smaller --model"
    )


def add_seed(
    design: Design, losses: Sequence[str], run_seconds: float, seconds: float, processes: int
) -> Design | None:
    """Return the design with one more seed; None if the time is too short, or there are seeds enough.

    Args:
        design: whose runs are all finished.
        losses: which are compared.
        run_seconds: of a run of the slowest loss, with all processes busy.
        seconds: that are left.
        processes: runs at a time.
    """
    rounds = math.ceil(design.runs_a_seed(losses) / processes)
    if len(design.seeds) >= MOST_SEEDS or rounds * run_seconds > seconds:
        return None
    return replace(design, seeds=(*design.seeds, max(design.seeds) + 1))


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
