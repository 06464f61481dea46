"""Steps with a bad sample, in one process or two; ``test_skipped_steps.py`` looks at what they changed."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from openclip_ext.training.step import Batch
from tests.training.tiny import TinyTraining, Way


def nan_pixel(batch: Batch) -> None:
    """One pixel of the last sample (of the last rank)."""
    batch["image"].view(-1)[-1] = float("nan")


def all_nan(batch: Batch) -> None:
    """No sample is valid."""
    batch["image"].fill_(float("nan"))


def changed(name: str, way: Way, spoil: Callable[[Batch], None] = nan_pixel) -> dict[str, Any]:
    """Two good steps, a bad one and a good one; what differs from the run without the bad one.

    Returns:
        ``by_bad_step``: names of the state that the bad step changed; ``later``: of the state after the last step that
        differs from the run without the bad one; ``moved``: of all that the last step changed; ``skipped``: number and
        samples of the steps that the guard reports; ``samples``: those of the bad step.
    """
    run, without = TinyTraining(name, way), TinyTraining(name, way)
    for number in range(2):
        run.take(number)
        without.take(number)
    before = run.state()
    run.take(2, spoil)
    by_bad_step = different(before, run.state())
    run.take(3)
    without.take(3)
    return {
        "by_bad_step": by_bad_step,
        "later": different(without.state(), run.state()),
        "skipped": [(step.number, step.samples, step.are_bad) for step in run.step.guard.learn(wait=True)],
        "moved": different(before, run.state()),
        "samples": run.batch(2)["index"].tolist(),
    }


def different(before: dict[str, Tensor], after: dict[str, Tensor]) -> list[str]:
    def same(name: str) -> bool:
        first, second = before[name], after[name]
        return torch.equal(first.isnan(), second.isnan()) and torch.equal(first.nan_to_num(), second.nan_to_num())

    assert before.keys() == after.keys()
    return [name for name in before if not same(name)]
