"""Steps with the model replicated (DDP) and spread (FSDP2) over two ranks; ``test_sharding.py`` compares them."""

import contextlib
import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import torch
from open_clip.model import convert_weights_to_lp
from torch import Tensor, nn

from openclip_ext.contrastive.loss import ContrastiveLoss
from openclip_ext.training import parallel
from openclip_ext.training.errors import UsageError
from openclip_ext.training.optimizer import OptimizerConfig, create_optimizer
from openclip_ext.training.step import StepSettings, TrainStep
from tests.training.tiny import (
    BATCH,
    LOSSES,
    OPTIMIZER,
    WIDTH,
    parts_of,
    prepare,
    tensors,
    tiny_batch,
    tiny_loss,
    tiny_model,
)

STEPS = 3
REPLICATED, SHARDED = "replicated", "sharded"
BACKEND = "eager"
CPU = torch.device("cpu")
BFLOAT16 = functools.partial(torch.autocast, "cpu", torch.bfloat16)
FLOAT16 = functools.partial(torch.autocast, "cpu", torch.float16)


@dataclass(frozen=True)
class Case:
    """A way to train."""

    loss: str
    tower: str = "vit"
    micro_batches: int = 1
    clip: float | None = None
    checkpointing: bool = False
    compiled: bool = False
    dtype: torch.dtype = torch.float64
    autocast: Callable[[], AbstractContextManager] = contextlib.nullcontext
    scale: float | None = None
    optimizer: OptimizerConfig = OPTIMIZER
    reshard: bool = True


LOOKAHEAD = replace(
    OPTIMIZER, name="timm/lookahead_sgd", beta1=None, beta2=None, momentum=0.9, lookahead_steps=2, lr=0.1
)

CASES = {
    **{loss: Case(loss) for loss in LOSSES},
    **{
        f"{loss}-accumulated-clipped-checkpointed": Case(loss, micro_batches=2, clip=0.05, checkpointing=True)
        for loss in LOSSES
    },
    # One loss of each kind: what they get of an autocast model does not depend on where its parameters lie.
    **{
        f"{loss}-amp_bf16": Case(loss, dtype=torch.float32, autocast=BFLOAT16)
        for loss in ("openclip", "siglip", "fastclip-v2", "neuclip", "simclr", "cliplite")
    },
    "fastclip-amp": Case("fastclip", dtype=torch.float32, autocast=BFLOAT16, scale=2.0**8, clip=0.05),
    # Too large at first, as the GradScaler's start often is: all ranks must skip a step where one finds an infinity.
    "amorlip-amp-overflow": Case("amorlip", dtype=torch.float32, autocast=FLOAT16, scale=2.0**10),
    "neuclip-pure_bf16": Case("neuclip", dtype=torch.bfloat16),
    "neuclip-compiled": Case("neuclip", compiled=True),
    "neuclip-compiled-checkpointed": Case("neuclip", compiled=True, checkpointing=True),
    "neuclip-no-reshard": Case("neuclip", reshard=False, micro_batches=2),
    "fastclip-resnet": Case("fastclip", tower="resnet", clip=0.05),
    "cliplite-lookahead": Case("cliplite", optimizer=LOOKAHEAD, clip=0.05),
    **{
        f"fastclip-{name}": Case("fastclip", optimizer=replace(OPTIMIZER, name=f"timm/{name}", momentum=0.9))
        for name in ("adamw", "sgd", "momentum", "lion")
    },
}

# Trained in one go, and resumed.
RESUMED = ["openclip", "siglip", "fastclip", "neuclip", "cliplite-lookahead", "neuclip-pure_bf16"]


class Run:
    """A few steps of a case on this rank's part of fixed batches."""

    def __init__(self, case: Case, sharded: bool, keep_whole: bool = False) -> None:
        self.case, self.sharded = case, sharded
        model = tiny_model(case.tower).to(case.dtype)
        if case.checkpointing:
            model.set_grad_checkpointing()
        self.loss: ContrastiveLoss = tiny_loss(case.loss)
        prepare(model, self.loss)
        if case.dtype == torch.float64:
            self.loss.double()
        self.model: nn.Module
        if sharded:
            self.model = parallel.ShardedDataParallel(model, CPU, case.reshard, case.compiled, keep_whole)
        else:
            self.model = parallel.replicate(model, CPU)
        self.optimizer = create_optimizer(self.model, case.optimizer, self.loss.logit_scale_lr, self.loss.model_head())
        scaler = None if case.scale is None else torch.amp.GradScaler("cpu", init_scale=case.scale)
        settings = StepSettings(CPU, case.dtype, case.autocast, case.clip)
        # As ``training/main.py`` does; a sharded model has compiled its blocks.
        stepped = torch.compile(self.model, backend=BACKEND) if case.compiled and not sharded else self.model
        self.step = TrainStep(stepped, self.loss, self.optimizer, settings, scaler)
        self.values: list[Tensor] = []

    def steps(self, first: int = 0, last: int = STEPS) -> "Run":
        """Take the steps ``first`` to ``last``."""
        rank, world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
        self.model.train()
        for number in range(first, last):
            batch = tiny_batch(number, self.loss.views, size=32 if self.case.tower == "resnet" else 16)
            own = parts_of(batch, world_size)[rank]
            terms = self.step(parts_of(own, self.case.micro_batches))
            self.values.append(sum(terms.values()))
        return self

    def result(self) -> dict[str, Tensor]:
        """All tensors of the run, under the names of a model without wrappers; parameters on the master only."""
        model = {name.removeprefix("module."): value for name, value in self.model.state_dict().items()}
        optimizer = parallel.optimizer_state_dict(self.model, self.optimizer)
        state = {"model": model, "optimizer": optimizer, "loss": self.loss.state_dict(), "values": self.values}
        if self.step.scaler is not None:
            state["scale"] = torch.tensor(self.step.scaler.get_scale())
        return tensors(state)


def resumed(case: Case, before_sharded: bool, after_sharded: bool) -> dict[str, Tensor]:
    """Two steps in one run, and the last one in another, from the first one's state."""
    before = Run(case, before_sharded).steps(last=STEPS - 1)
    states = [before.model.state_dict(), parallel.optimizer_state_dict(before.model, before.optimizer)]
    # Every process reads the master's file.
    torch.distributed.broadcast_object_list(states)
    after = Run(case, after_sharded)
    model = after.model if after.sharded else after.model.module
    model.load_state_dict({name.removeprefix("module."): value for name, value in states[0].items()})
    parallel.load_optimizer_state_dict(after.model, after.optimizer, states[1])
    after.loss.load_state_dict(before.loss.state_dict())
    after.values = before.values
    return after.steps(first=STEPS - 1).result()


def evaluated() -> list[str]:
    """Where the model to evaluate differs from the trained one, on the master; the other rank gets none."""
    run = Run(CASES["fastclip"], sharded=True, keep_whole=True).steps()
    for _ in range(2):
        with parallel.whole_model(run.model, needed=True) as model:
            assert (model is not None) == (torch.distributed.get_rank() == 0)
        with parallel.whole_model(run.model, needed=False) as nothing:
            assert nothing is None
        run.steps(last=1)  # training goes on, and the next evaluation is of what it has become
    with parallel.whole_model(run.model, needed=True) as model:
        trained = run.model.state_dict()
        if model is None:
            return []
        assert model.encode_text(tiny_batch(0)["text"]).shape == (BATCH, WIDTH)
        return [name for name, value in model.state_dict().items() if not torch.equal(value, trained[name])]


def refused() -> list[str]:
    """The messages of what a sharded model refuses."""
    model = tiny_model()
    convert_weights_to_lp(model)  # --precision bf16 and fp16
    messages = []
    for attempt in (
        lambda: parallel.ShardedDataParallel(model, CPU),
        lambda: parallel.check_shardable("timm/lamb", has_scaler=False, has_head=False),
        lambda: parallel.check_shardable("adamw", has_scaler=True, has_head=True),
    ):
        try:
            attempt()
        except UsageError as error:
            messages.append(str(error))
    return messages


@contextlib.contextmanager
def _compiler() -> Iterator[None]:
    """What is compared is how the blocks are compiled, not the compiler."""
    compile_module = functools.partialmethod(nn.Module.compile, backend=BACKEND)
    # main() switches this off where gradient checkpointing asks for it.
    with mock.patch.object(nn.Module, "compile", compile_module), torch._dynamo.config.patch(optimize_ddp=False):
        yield


def trained(name: str) -> dict[Any, dict[str, Tensor]]:
    """The case both ways."""
    with _compiler():
        return {kind: Run(CASES[name], kind == SHARDED).steps().result() for kind in (REPLICATED, SHARDED)}


def resumed_both_ways(name: str) -> dict[Any, dict[str, Tensor]]:
    """The case resumed in the same way, and in the other."""
    ways = [(SHARDED, SHARDED), (SHARDED, REPLICATED), (REPLICATED, SHARDED)]
    return {(before, after): resumed(CASES[name], before == SHARDED, after == SHARDED) for before, after in ways}
