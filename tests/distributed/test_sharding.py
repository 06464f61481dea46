"""Training with FSDP2 on two processes equals training with DDP, for every loss and every way to compute a step.

FSDP2 loads DDP's state, and DDP loads FSDP2's state.
"""

import contextlib
import functools
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from open_clip.model import convert_weights_to_lp
from torch import Tensor, nn

from openclip_ext.cli.errors import UsageError
from openclip_ext.training import parallel
from tests.devices import needs_sharding
from tests.distributed.pool import two_ranks
from tests.training import tiny
from tests.training.runs import (
    SMALL_MODEL,
    assert_same_run,
    final_state,
    make_shards,
    results_of,
    run_on_two_ranks,
    small_command,
    stock_model,
)

pytestmark = needs_sharding

STEPS = 3
REPLICATED, SHARDED = "replicated", "sharded"


# A case: the name of a loss, and how its steps are computed.
Case = tuple[str, tiny.Way]


def _case(loss: str, dtype: torch.dtype = torch.float64, **way: Any) -> Case:
    return loss, tiny.Way(dtype=dtype, **way)


LOOKAHEAD = replace(
    tiny.OPTIMIZER, name="timm/lookahead_sgd", beta1=None, beta2=None, momentum=0.9, lookahead_steps=2, lr=0.1
)

# These losses, one of each kind, also use micro-batches. The first cases test other losses with one layer, which is fast
# and sufficient, because a loss does not depend on how parameters are sharded. The other cases have two layers.
ACCUMULATED = ("siglip", "fastclip-v2", "neuclip", "simclr", "cliplite")
# Their state is of the same kind as that of a loss that is tested.
ALIKE = ("fastclip-v0", "fastclip-v1", "fastclip-v3", "isogclr", "neuclip-paper", "queueclip", "scent", "sogclr")
CASES = {
    **{loss: _case(loss, layers=1) for loss in tiny.LOSSES if loss not in ACCUMULATED + ALIKE},
    **{
        f"{loss}-accumulated-clipped-checkpointed": _case(
            loss, layers=1, micro_batches=2, clip=0.05, checkpointing=True
        )
        for loss in ACCUMULATED
    },
    "openclip-amp_bf16": _case("openclip", dtype=torch.float32, autocast=tiny.BFLOAT16),
    "cliplite-amp_bf16": _case("cliplite", dtype=torch.float32, autocast=tiny.BFLOAT16),
    "fastclip-amp": _case("fastclip", dtype=torch.float32, autocast=tiny.BFLOAT16, scale=2.0**8, clip=0.05),
    # The initial loss scale is too large. If the gradients of one rank overflow, all ranks must skip the step.
    "amorlip-amp-overflow": _case("amorlip", dtype=torch.float32, autocast=tiny.FLOAT16, scale=2.0**10),
    "neuclip-pure_bf16": _case("neuclip", dtype=torch.bfloat16),
    "neuclip-compiled-checkpointed": _case("neuclip", layers=1, compiled=True, checkpointing=True),
    "neuclip-no-reshard": _case("neuclip", reshard=False, micro_batches=2),
    "fastclip-resnet": _case("fastclip", tower="resnet", clip=0.05),
    "cliplite-lookahead": _case("cliplite", optimizer=LOOKAHEAD, clip=0.05),
    **{
        f"fastclip-{name}": _case("fastclip", optimizer=replace(tiny.OPTIMIZER, name=f"timm/{name}", momentum=0.9))
        for name in ("adamw", "sgd", "momentum", "lion")
    },
}


class Run(tiny.TinyTraining):
    """A short training run with the loss and the model of a case."""

    def __init__(self, case: Case, sharded: bool) -> None:
        super().__init__(case[0], replace(case[1], sharded=sharded))
        self.values: list[Tensor] = []

    def steps(self, first: int = 0, last: int = STEPS) -> "Run":
        """Take the steps ``first`` to ``last - 1``; return this training run."""
        self.model.train()
        self.values += [sum(self.take(number).values()) for number in range(first, last)]
        return self

    def result(self) -> dict[str, Tensor]:
        """Return all tensors of the training state, the loss values of the steps, and the gradient scaler's scale, if any."""
        scaler = self.step.scaler
        scale = {} if scaler is None else {"scale": torch.tensor(scaler.get_scale())}
        return self.state() | tiny.tensors({"values": self.values} | scale)


def resumed(case: Case, before_sharded: bool, after_sharded: bool) -> dict[str, Tensor]:
    """Take all steps except the last in one run, and the last step in a resumed run; return the result."""
    before = Run(case, before_sharded).steps(last=STEPS - 1)
    states = [before.model.state_dict(), parallel.optimizer_state_dict(before.model, before.optimizer)]
    # In a real run, rank 0 saves these states to a file, which every process reads.
    torch.distributed.broadcast_object_list(states)
    after = Run(case, after_sharded)
    model = after.model if after_sharded else after.model.module
    model.load_state_dict({name.removeprefix("module."): value for name, value in states[0].items()})
    parallel.load_optimizer_state_dict(after.model, after.optimizer, states[1])
    after.loss.load_state_dict(before.loss.state_dict())
    after.values = before.values
    return after.steps(first=STEPS - 1).result()


@contextlib.contextmanager
def _compiler() -> Iterator[None]:
    """Compile with the "eager" backend, which is fast: the tests check which blocks are compiled, not the compiler."""
    compile_module = functools.partialmethod(nn.Module.compile, backend="eager")
    # main() also disables optimize_ddp if gradient checkpointing requires it.
    with mock.patch.object(nn.Module, "compile", compile_module), torch._dynamo.config.patch(optimize_ddp=False):
        yield


def train_both_ways(name: str) -> dict[Any, dict[str, Tensor]]:
    """Train a case with replicated and with sharded parameters; return both results."""
    with _compiler():
        return {kind: Run(CASES[name], kind == SHARDED).steps().result() for kind in (REPLICATED, SHARDED)}


def resumed_both_ways(name: str) -> dict[Any, dict[str, Tensor]]:
    """Return the results of resumed training runs: from sharded parameters to both kinds, and from replicated to sharded."""
    ways = [(SHARDED, SHARDED), (SHARDED, REPLICATED), (REPLICATED, SHARDED)]
    return {(before, after): resumed(CASES[name], before == SHARDED, after == SHARDED) for before, after in ways}


# --- in this process --------------------------------------------------------------------------------------------------

# Results differ only in the order of additions. AdaGrad and Adam amplify this difference if a gradient is nearly zero.
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-6, torch.bfloat16: 1e-6}


@functools.cache
def trained(name: str) -> list[dict]:
    """Return the results of both training runs of a case, for each rank."""
    return two_ranks().run(train_both_ways, name)


@pytest.mark.parametrize("name", CASES)
def test_spread_parameters_train_as_replicas(name):
    """After three steps, loss values, parameters, optimizer state and loss state equal those with replicated parameters."""
    results, others = trained(name)
    weights = [key for key in others[SHARDED] if key.startswith(".model") and key.endswith("weight")]
    assert weights == []  # full weights exist only on rank 0
    tiny.assert_close(results[SHARDED], results[REPLICATED], rtol=0, atol=TOLERANCE[CASES[name][1].dtype])


def test_all_processes_skip_a_step_that_overflows():
    result = trained("amorlip-amp-overflow")[0][SHARDED]
    assert result[".scale"] == 2.0**8  # the scale was halved twice
    assert result[".optimizer.state.0.step"] == 1


@pytest.mark.parametrize("name", ["fastclip", "cliplite-lookahead", "neuclip-pure_bf16"])
def test_a_run_goes_on_the_same_or_the_other_way(name):
    expected = trained(name)[0][SHARDED]
    found, _ = two_ranks().run(resumed_both_ways, name)
    tiny.assert_close(found[SHARDED, SHARDED], expected, rtol=0, atol=0)
    for switch in ((SHARDED, REPLICATED), (REPLICATED, SHARDED)):
        tiny.assert_close(found[switch], expected, rtol=0, atol=TOLERANCE[CASES[name][1].dtype])


def test_what_cannot_be_spread_is_refused_with_the_reason():
    model = tiny.tiny_model()
    convert_weights_to_lp(model)  # --precision bf16 does this
    with pytest.raises(UsageError, match=r"torch\.float16, torch\.float32"):
        parallel.ShardedDataParallel(model, tiny.CPU, parallel.ParallelConfig(fsdp=True), keep_whole=False)
    with pytest.raises(UsageError, match="--fsdp does not support --opt timm/lamb"):
        parallel.check_shardable("timm/lamb", has_scaler=False, has_head=False)
    with pytest.raises(UsageError, match="does not support torch's GradScaler"):
        parallel.check_shardable("adamw", has_scaler=True, has_head=True)


# --- the command line -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trainings(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("fsdp")
    shards = make_shards(folder / "shards")
    # NeuCLIP's AdaGrad amplifies rounding, so both kinds of runs encode the texts in the same way.
    more = ["--batch-size", "8", "--val-data", shards, "--resume", "latest", "--text-groups", "1"]

    def make(name: str, *flags: str, stop_after: int | None = None) -> None:
        run_on_two_ranks(small_command(shards, folder, name, "neuclip", *more, *flags), stop_after)

    make("ddp")
    make("fsdp", "--fsdp")
    make("resumed", "--fsdp", stop_after=8)
    shutil.copytree(folder / "resumed", folder / "to-ddp")
    make("resumed", "--fsdp")
    make("to-ddp")
    return folder


def test_a_resumed_run_is_the_uninterrupted_one(trainings):
    assert_same_run(trainings / "resumed", trainings / "fsdp")


@pytest.mark.parametrize("name", ["fsdp", "to-ddp"])
def test_sharded_and_replicated_runs_agree(trainings, name):
    found, expected = (final_state(trainings / run) for run in (name, "ddp"))
    for state in (found, expected):
        model = state["model"]["state_dict"]
        state["model"]["state_dict"] = {key.removeprefix("module."): value for key, value in model.items()}
    tiny.assert_close(tiny.tensors(found), tiny.tensors(expected), rtol=1e-4, atol=1e-5)


def test_stock_openclip_loads_and_the_evaluation_was_of_the_checkpoint(trainings):
    stock_model(trainings / "fsdp" / "checkpoints" / "epoch_2.pt", SMALL_MODEL)
    results = [results_of(trainings / run) for run in ("fsdp", "ddp")]
    for sharded, replicated in zip(*results, strict=True):
        assert sharded["clip_val_loss"] == pytest.approx(replicated["clip_val_loss"], rel=1e-4)
