"""Steps with a bad sample, in one process or two; ``test_skipped_steps.py`` looks at what they changed."""

import contextlib
import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from openclip_ext import distributed
from openclip_ext.training import parallel
from openclip_ext.training.guard import StepGuard
from openclip_ext.training.optimizer import create_optimizer
from openclip_ext.training.step import Batch, StepSettings, TrainStep
from tests.training.tiny import OPTIMIZER, parts_of, prepare, tensors, tiny_batch, tiny_loss, tiny_model

CPU = torch.device("cpu")
FLOAT16 = functools.partial(torch.autocast, "cpu", torch.float16)


@dataclass(frozen=True)
class Way:
    """How a step is computed.

    Attributes:
        on_device: decide without the host, as on a GPU.
    """

    tower: str = "vit"
    micro_batches: int = 1
    clip: float | None = None
    scale: float | None = None
    autocast: Callable[[], AbstractContextManager] = contextlib.nullcontext
    on_device: bool = False
    sharded: bool = False


class Run:
    """A model, a loss and an optimizer, and what they have become."""

    def __init__(self, name: str, way: Way) -> None:
        self.way = way
        model, self.loss = tiny_model(way.tower), tiny_loss(name)
        prepare(model, self.loss)
        several = distributed.world_size() > 1
        if several and way.sharded:
            model = parallel.ShardedDataParallel(model, CPU)
        elif several:
            model = parallel.replicate(model, CPU)
        self.model = model
        self.optimizer = create_optimizer(model, OPTIMIZER, self.loss.logit_scale_lr, self.loss.model_head())
        scaler = None if way.scale is None else torch.amp.GradScaler("cpu", init_scale=way.scale)
        self.step = TrainStep(model, self.loss, self.optimizer, StepSettings(CPU, None, way.autocast, way.clip), scaler)
        if way.on_device:
            self.step.guard = StepGuard(model, self.loss, on_host=False)
        model.train()

    def batch(self, number: int) -> Batch:
        """The whole batch of a step."""
        return tiny_batch(number, self.loss.views, size=32 if self.way.tower == "resnet" else 16)

    def take(self, number: int, spoil: Callable[[Batch], None] | None = None) -> dict[str, Tensor]:
        """A step on this rank's part of a batch; ``spoil`` changes the whole batch before."""
        batch = self.batch(number)
        if spoil is not None:
            spoil(batch)
        own = parts_of(batch, distributed.world_size())[distributed.rank()]
        return self.step(parts_of(own, self.way.micro_batches), number)

    def state(self) -> dict[str, Tensor]:
        """All tensors and counters."""
        states: dict[str, Any] = {
            "model": self.model.state_dict(),
            "optimizer": parallel.optimizer_state_dict(self.model, self.optimizer),
            "loss": self.loss.state_dict(),
        }
        counters = {f"counter.{key}": torch.tensor(value) for key, value in self.loss.get_extra_state().items()}
        return {**tensors(states), **counters}


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
    run, without = Run(name, way), Run(name, way)
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
