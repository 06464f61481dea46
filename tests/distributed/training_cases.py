"""The training steps that ``test_training.py`` compares between one process, two processes and accumulation.

Also run as a program by each of two ranks: ``python -m tests.distributed.training_cases RANK WORLD RENDEZVOUS OUTPUT``.
"""

import copy
import os
import sys
from dataclasses import dataclass, field
from datetime import timedelta

import open_clip
import torch
from torch import Tensor, nn

from openclip_ext.losses import registry
from openclip_ext.model_configs import add_model_configs
from openclip_ext.training.optimizer import OptimizerConfig, ScheduleConfig, create_optimizer, create_schedule
from openclip_ext.training.step import Batch, StepSettings, TrainStep
from openclip_ext.training.views import train_image_tower_only

GLOBAL_BATCH, STEPS, NUM_SAMPLES = 8, 5, 40
MODEL = "demo-vit"  # no BatchNorm: its statistics are those of a rank's batch


@dataclass(frozen=True)
class Case:
    """A loss and its options; ``scaled`` ones sum the same gradient over the ranks that one process has."""

    loss: str
    options: dict = field(default_factory=dict)

    @property
    def name(self) -> str:
        return "-".join([self.loss, *self.options])


CASES = [
    Case("openclip"),
    Case("siglip"),
    Case("fastclip", {"gamma": 0.5, "rho": 6.5}),
    Case("amorlip", {"gather_stage2": True, "fit_every": 2, "normalizer_lr": 1e-2}),
    Case("neuclip", {"prototypes": 20, "normalizer_updates": 3, "restart_every": 3}),
    Case("neuclip", {"prototypes": 8, "alpha_gradient": False}),
    Case("simclr"),
    Case("sogclr", {"views": 2, "gamma": 0.5}),
]
# Each process contrasts its own samples: two processes are the mean of two blocks in one.
BLOCK_CASES = [Case("cliplite"), Case("cliplite", {"projection_dim": 24})]


OPTIMIZER = OptimizerConfig(name="adamw", lr=1e-3, weight_decay=0.1, beta1=0.9, beta2=0.98, eps=1e-6)
SCHEDULE = ScheduleConfig(name="cosine", lr=1e-3, warmup=2, epochs=1)


def run(case: Case, rank: int = 0, world_size: int = 1, micro_batches: int = 1) -> dict[str, Tensor]:
    """Train a few float64 steps on this rank's part of fixed batches; returns parameters and the loss's state."""
    torch.manual_seed(0)
    bias = {"init_logit_scale": 2.3, "init_logit_bias": -10.0} if case.loss == "siglip" else {}
    model = open_clip.create_model(MODEL, output_dict=True, **bias).double()
    common = {"local_loss": True, "gather_with_grad": True} if case.loss == "openclip" else {}
    loss = registry.create_loss(case.loss, embed_dim=64, num_samples=NUM_SAMPLES, **common, **case.options)
    loss = loss.double()
    if loss.views > 1:
        train_image_tower_only(model)
    wrapped = nn.parallel.DistributedDataParallel(model) if world_size > 1 else model
    optimizer = create_optimizer(wrapped, OPTIMIZER, loss.logit_scale_lr, loss.model_head())
    schedule = create_schedule(SCHEDULE, optimizer, STEPS, loss.logit_scale_lr)
    step = TrainStep(wrapped, loss, optimizer, StepSettings(torch.device("cpu"), input_dtype=torch.float64))
    loss.start_epoch(0)
    for number in range(STEPS):
        schedule(number)
        step(micro_batches_of(fixed_batch(number, loss.views), rank, world_size, micro_batches))
    return result_of(model, loss)


def run_in_blocks(case: Case, blocks: int) -> dict[str, Tensor]:
    """The same in one process: the mean of the losses of ``blocks`` parts of each batch, statistics averaged."""
    torch.manual_seed(0)
    model = open_clip.create_model(MODEL, output_dict=True).double()
    loss = registry.create_loss(case.loss, embed_dim=64, **case.options).double()
    optimizer = create_optimizer(model, OPTIMIZER, None, loss.model_head())
    schedule = create_schedule(SCHEDULE, optimizer, STEPS, None)
    for number in range(STEPS):
        schedule(number)
        optimizer.zero_grad()
        before = copy.deepcopy(loss.state_dict())
        after = []
        for block in micro_batches_of(fixed_batch(number), 0, 1, blocks):
            loss.load_state_dict(before)
            outputs = model(block["image"], block["text"])
            (loss(**outputs) / blocks).backward()
            after.append(copy.deepcopy(loss.state_dict()))
        mean = {name: sum(state[name] for state in after) / blocks for name in tensors(before)}
        loss.load_state_dict({**after[0], **mean})
        optimizer.step()
        with torch.no_grad():
            loss.finish_logit_scale_step(model.logit_scale)
    return result_of(model, loss)


def result_of(model: nn.Module, loss: nn.Module) -> dict[str, Tensor]:
    """The model's parameters and the loss's state."""
    state = {f"loss.{name}": value for name, value in tensors(loss.state_dict()).items()}
    return {**state, **{name: value.detach().clone() for name, value in model.named_parameters()}}


def fixed_batch(number: int, views: int = 1) -> Batch:
    """The global batch of a step; captions end with the end-of-text token, the largest."""
    shape = (3, 32, 32) if views == 1 else (views, 3, 32, 32)
    generator = torch.Generator().manual_seed(100 + number)
    text = torch.randint(1, 1000, (GLOBAL_BATCH, 20), generator=generator)
    text[:, -1] = 49407
    return {
        "image": torch.randn(GLOBAL_BATCH, *shape, generator=generator, dtype=torch.float64),
        "text": text,
        "index": torch.randint(0, NUM_SAMPLES, (GLOBAL_BATCH,), generator=generator),
    }


def micro_batches_of(batch: Batch, rank: int, world_size: int, count: int) -> list[Batch]:
    """This rank's rows, in ``count`` parts."""
    own = {key: value.chunk(world_size)[rank] for key, value in batch.items()}
    parts = {key: value.chunk(count) for key, value in own.items()}
    return [{key: parts[key][number] for key in parts} for number in range(count)]


def tensors(state: dict, prefix: str = "") -> dict[str, Tensor]:
    """The floating-point tensors of a nested state dictionary, by dotted name."""
    found = {}
    for key, value in state.items():
        if isinstance(value, Tensor) and value.is_floating_point():
            found[f"{prefix}{key}"] = value.detach().clone()
        elif isinstance(value, dict):
            found |= tensors(value, f"{prefix}{key}.")
    return found


def main() -> None:
    rank, world_size = int(sys.argv[1]), int(sys.argv[2])
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    add_model_configs()
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{sys.argv[3]}", rank=rank, world_size=world_size, timeout=timedelta(minutes=2)
    )
    results = {
        (case.name, micro_batches): run(case, rank, world_size, micro_batches)
        for case in [*CASES, *BLOCK_CASES]
        for micro_batches in (1, 2)
    }
    torch.save(results, f"{sys.argv[4]}.{rank}")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
