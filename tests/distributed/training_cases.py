"""The training steps that ``test_training.py`` compares between one process, two processes and accumulation."""

import copy
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from openclip_ext.losses import registry
from openclip_ext.training.optimizer import ScheduleConfig, create_optimizer, create_schedule
from openclip_ext.training.step import StepSettings, TrainStep
from tests.training.tiny import (
    LOSSES,
    OPTIMIZER,
    SAMPLES,
    WIDTH,
    parts_of,
    prepare,
    tensors,
    tiny_batch,
    tiny_model,
)

STEPS = 5
SCHEDULE = ScheduleConfig(name="cosine", lr=OPTIMIZER.lr, warmup=2, epochs=1)


class Case(NamedTuple):
    """A loss and its options."""

    loss: str
    options: dict[str, Any]


# Losses that contrast each process's samples alone: two processes are the mean of two blocks in one.
LOCAL = {"cliplite"}
BLOCK_CASES = {
    **{loss: Case(loss, LOSSES[loss]) for loss in LOCAL},
    "cliplite-wide": Case("cliplite", {"projection_dim": 24}),
}
CASES = {
    **{loss: Case(loss, options) for loss, options in LOSSES.items() if loss not in LOCAL},
    # Every third step starts with fresh prototypes; and fewer prototypes than there are samples in a batch.
    "neuclip-many": Case("neuclip", {"prototypes": 20, "normalizer_updates": 3, "restart_every": 3}),
    "neuclip-no-alpha-gradient": Case("neuclip", {"prototypes": 8, "alpha_gradient": False}),
    "sogclr-views": Case("sogclr", {"views": 2, "gamma": 0.5}),
}
_ALL = CASES | BLOCK_CASES


def run(name: str, micro_batches: int = 1) -> dict[str, Tensor]:
    """Train a few float64 steps on this rank's part of fixed batches; returns parameters and the loss's state."""
    together = torch.distributed.is_initialized()
    rank, world_size = (torch.distributed.get_rank(), torch.distributed.get_world_size()) if together else (0, 1)
    model, loss = _start(name)
    wrapped = nn.parallel.DistributedDataParallel(model) if together else model
    optimizer = create_optimizer(wrapped, OPTIMIZER, loss.logit_scale_lr, loss.model_head())
    schedule = create_schedule(SCHEDULE, optimizer, STEPS, loss.logit_scale_lr)
    step = TrainStep(wrapped, loss, optimizer, StepSettings(torch.device("cpu"), input_dtype=torch.float64))
    loss.start_epoch(0)
    for number in range(STEPS):
        schedule(number)
        own = parts_of(tiny_batch(number, loss.views, torch.float64), world_size)[rank]
        step(parts_of(own, micro_batches))
    return _result(model, loss)


def run_in_blocks(name: str, blocks: int) -> dict[str, Tensor]:
    """The same in one process: the mean of the losses of ``blocks`` parts of each batch, statistics averaged."""
    model, loss = _start(name)
    optimizer = create_optimizer(model, OPTIMIZER, None, loss.model_head())
    schedule = create_schedule(SCHEDULE, optimizer, STEPS, None)
    for number in range(STEPS):
        schedule(number)
        optimizer.zero_grad()
        before = copy.deepcopy(loss.state_dict())
        after = []
        for block in parts_of(tiny_batch(number, dtype=torch.float64), blocks):
            loss.load_state_dict(before)
            outputs = model(block["image"], block["text"])
            (loss(**outputs) / blocks).backward()
            after.append(copy.deepcopy(loss.state_dict()))
        averaged = [key for key, value in before.items() if isinstance(value, Tensor) and value.is_floating_point()]
        mean = {key: sum(state[key] for state in after) / blocks for key in averaged}
        loss.load_state_dict({**after[0], **mean})
        optimizer.step()
        with torch.no_grad():
            loss.finish_logit_scale_step(model.logit_scale)
    return _result(model, loss)


def _start(name: str) -> tuple[Any, Any]:
    model = tiny_model().double()
    case = _ALL[name]
    loss = registry.create_loss(case.loss, embed_dim=WIDTH, num_samples=SAMPLES, **case.options).double()
    prepare(model, loss)
    return model, loss


def _result(model: nn.Module, loss: nn.Module) -> dict[str, Tensor]:
    """The model's parameters and the loss's state, floating-point tensors."""
    state = tensors({"loss": loss.state_dict(), "model": dict(model.named_parameters())})
    return {name: value for name, value in state.items() if value.is_floating_point()}
