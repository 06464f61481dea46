"""Steps with the model replicated (DDP) and spread (FSDP2) over two ranks; ``test_sharding.py`` compares them."""

import contextlib
import functools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple
from unittest import mock

import torch
from open_clip.model import convert_weights_to_lp
from torch import Tensor, nn

from openclip_ext.training import parallel
from openclip_ext.training.errors import UsageError
from tests.training.tiny import (
    BATCH,
    BFLOAT16,
    CPU,
    FLOAT16,
    LOSSES,
    OPTIMIZER,
    WIDTH,
    TinyTraining,
    Way,
    tensors,
    tiny_batch,
    tiny_model,
)

STEPS = 3
REPLICATED, SHARDED = "replicated", "sharded"


class Case(NamedTuple):
    """A loss and how its steps are computed."""

    loss: str
    way: Way


def _case(loss: str, dtype: torch.dtype = torch.float64, **way: Any) -> Case:
    return Case(loss, Way(dtype=dtype, **way))


LOOKAHEAD = replace(
    OPTIMIZER, name="timm/lookahead_sgd", beta1=None, beta2=None, momentum=0.9, lookahead_steps=2, lr=0.1
)

CASES = {
    **{loss: _case(loss) for loss in LOSSES},
    **{
        f"{loss}-accumulated-clipped-checkpointed": _case(loss, micro_batches=2, clip=0.05, checkpointing=True)
        for loss in LOSSES
    },
    # One loss of each kind: what they get of an autocast model does not depend on where its parameters lie.
    **{
        f"{loss}-amp_bf16": _case(loss, dtype=torch.float32, autocast=BFLOAT16)
        for loss in ("openclip", "siglip", "fastclip-v2", "neuclip", "simclr", "cliplite")
    },
    "fastclip-amp": _case("fastclip", dtype=torch.float32, autocast=BFLOAT16, scale=2.0**8, clip=0.05),
    # Too large at first, as the GradScaler's start often is: all ranks must skip a step where one finds an infinity.
    "amorlip-amp-overflow": _case("amorlip", dtype=torch.float32, autocast=FLOAT16, scale=2.0**10),
    "neuclip-pure_bf16": _case("neuclip", dtype=torch.bfloat16),
    "neuclip-compiled": _case("neuclip", compiled=True),
    "neuclip-compiled-checkpointed": _case("neuclip", compiled=True, checkpointing=True),
    "neuclip-no-reshard": _case("neuclip", reshard=False, micro_batches=2),
    "fastclip-resnet": _case("fastclip", tower="resnet", clip=0.05),
    "cliplite-lookahead": _case("cliplite", optimizer=LOOKAHEAD, clip=0.05),
    **{
        f"fastclip-{name}": _case("fastclip", optimizer=replace(OPTIMIZER, name=f"timm/{name}", momentum=0.9))
        for name in ("adamw", "sgd", "momentum", "lion")
    },
}

# Trained in one go, and resumed.
RESUMED = ["openclip", "siglip", "fastclip", "neuclip", "cliplite-lookahead", "neuclip-pure_bf16"]


class Run(TinyTraining):
    """A few steps of a case."""

    def __init__(self, case: Case, sharded: bool, keep_whole: bool = False) -> None:
        super().__init__(case.loss, replace(case.way, sharded=sharded), keep_whole)
        self.values: list[Tensor] = []

    def steps(self, first: int = 0, last: int = STEPS) -> "Run":
        """Take the steps ``first`` to ``last``."""
        self.model.train()
        self.values += [sum(self.take(number).values()) for number in range(first, last)]
        return self

    def result(self) -> dict[str, Tensor]:
        """Return all tensors of the run, the values of its steps and the scaler's scale."""
        scaler = self.step.scaler
        scale = {} if scaler is None else {"scale": torch.tensor(scaler.get_scale())}
        return self.state() | tensors({"values": self.values} | scale)


def resumed(case: Case, before_sharded: bool, after_sharded: bool) -> dict[str, Tensor]:
    """Two steps in one run, and the last one in another, from the first one's state."""
    before = Run(case, before_sharded).steps(last=STEPS - 1)
    states = [before.model.state_dict(), parallel.optimizer_state_dict(before.model, before.optimizer)]
    # Every process reads the master's file.
    torch.distributed.broadcast_object_list(states)
    after = Run(case, after_sharded)
    model = after.model if after_sharded else after.model.module
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
        lambda: parallel.distribute(model, parallel.ParallelConfig(fsdp=True), CPU, keep_whole=False),
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
    compile_module = functools.partialmethod(nn.Module.compile, backend="eager")
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
