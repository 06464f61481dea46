"""Every loss in every way that a step can be computed: precision, compiled, checkpointed, accumulated."""

import contextlib
import functools
import shutil
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

import pytest
import torch
from open_clip.model import convert_weights_to_lp
from torch import Tensor, nn

from openclip_ext import compat
from openclip_ext.contrastive.loss import ContrastiveLoss
from openclip_ext.training.optimizer import create_optimizer
from openclip_ext.training.step import StepSettings, TrainStep
from tests.losses.cases import CASES, make_steps, run_step
from tests.training import tiny
from tests.training.runs import command, metrics_of, run
from tests.training.tiny import (
    BFLOAT16,
    CPU,
    FLOAT16,
    LOSSES,
    OPTIMIZER,
    TinyTraining,
    parts_of,
    prepare,
    tensors,
    tiny_batch,
    tiny_loss,
    tiny_model,
)


@dataclass(frozen=True)
class Way:
    """How a step is computed.

    Attributes:
        error: largest relative error of value and gradient against the plain step in float64.
        dtype: of the images, and of parameters unless ``mixed``.
        mixed: as ``--precision bf16``: matrices in ``dtype``, norms in float32.
        scaled: with a GradScaler, whose factor is a power of two.
    """

    error: float
    dtype: torch.dtype = torch.float64
    autocast: Callable[[], AbstractContextManager] = contextlib.nullcontext
    scaled: bool = False
    mixed: bool = False
    checkpointing: bool = False
    micro_batches: int = 1
    device: torch.device = CPU


# bfloat16 has 8 significant bits and float16 11: a rounding is off by 0.2 % or 0.02 % on average, and some tens of them lie
# between a weight and its gradient. Where nothing is rounded, the order of additions is all that differs.
EXACT, IN_FLOAT32, IN_FLOAT16, IN_BFLOAT16 = 1e-12, 1e-5, 0.02, 0.1
WAYS = {
    "checkpointed": Way(EXACT, checkpointing=True),
    "accumulated": Way(EXACT, micro_batches=2),
    "accumulated-checkpointed": Way(EXACT, micro_batches=4, checkpointing=True),
    "scaled": Way(EXACT, scaled=True, micro_batches=2),
    "fp32": Way(IN_FLOAT32, torch.float32),
    "amp_bf16": Way(IN_BFLOAT16, torch.float32, BFLOAT16),
    "amp_bf16-accumulated": Way(IN_BFLOAT16, torch.float32, BFLOAT16, micro_batches=2, checkpointing=True),
    "amp": Way(IN_FLOAT16, torch.float32, FLOAT16, scaled=True),
    "bf16": Way(IN_BFLOAT16, torch.bfloat16, mixed=True),
    "pure_bf16": Way(IN_BFLOAT16, torch.bfloat16),
}


@dataclass
class Result:
    """What a step gave: the loss, the gradient of all parameters as one vector, that of the logit scale, the state."""

    value: Tensor
    gradient: Tensor
    logit_scale_gradient: Tensor
    loss: ContrastiveLoss

    @property
    def state(self) -> dict[str, Tensor]:
        return tensors(self.loss.state_dict())


def one_step(name: str, way: Way, compiled: nn.Module | None = None) -> Result:
    """The first step of a training run."""
    model, loss = tiny_model().to(way.device), tiny_loss(name).to(way.device)
    prepare(model, loss)
    if compiled is not None:
        start, model = model.state_dict(), compiled._orig_mod
        model.load_state_dict(start)
    if way.checkpointing:
        model.set_grad_checkpointing()
    convert_weights_to_lp(model, way.dtype) if way.mixed else model.to(way.dtype)
    if way.dtype == torch.float64:
        loss.double()
    optimizer = create_optimizer(model, OPTIMIZER, loss.logit_scale_lr, loss.model_head())
    scaler = torch.amp.GradScaler(way.device.type, init_scale=2.0**8) if way.scaled else None
    settings = StepSettings(way.device, way.dtype, way.autocast)
    step = TrainStep(model if compiled is None else compiled, loss, optimizer, settings, scaler)
    step.model.train()
    terms = step(parts_of(tiny_batch(0, loss.views), way.micro_batches))
    head = loss.model_head()
    parameters = [*model.parameters(), *([] if head is None else head.parameters())]
    gradients = [parameter.grad.double().flatten() for parameter in parameters if parameter.grad is not None]
    logit_scale = model.logit_scale.grad
    return Result(
        sum(terms.values()).double().cpu(),
        torch.cat(gradients).cpu(),
        torch.zeros((), dtype=torch.float64) if logit_scale is None else logit_scale.double().cpu(),
        loss,
    )


@functools.cache
def plain_step(name: str) -> Result:
    return one_step(name, Way(0.0))


def assert_agrees(result: Result, expected: Result, error: float) -> None:
    def distance(actual: Tensor, wanted: Tensor) -> float:
        return float((actual - wanted).norm() / wanted.norm().clamp(min=1e-300))

    assert distance(result.value, expected.value) <= error
    assert distance(result.gradient, expected.gradient) <= error
    assert distance(result.logit_scale_gradient, expected.logit_scale_gradient) <= error
    assert result.loss.calls == 1  # the state has seen the batch once, whatever its parts
    for name, state in result.state.items():
        assert not torch.isinf(state).any(), name
        if error == EXACT:
            torch.testing.assert_close(state, expected.state[name], rtol=1e-9, atol=1e-9, equal_nan=True)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", LOSSES)
def test_a_step_agrees_with_the_plain_one(name, way):
    assert_agrees(one_step(name, WAYS[way]), plain_step(name), WAYS[way].error)


@pytest.mark.gpu
@pytest.mark.parametrize(("precision", "error"), [("amp", IN_FLOAT16), ("amp_bf16", IN_BFLOAT16)])
@pytest.mark.parametrize("name", LOSSES)
def test_autocast_on_a_gpu(name, precision, error):
    """What a CPU cannot show: CUDA's autocast, with float16 for ``amp``."""
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    device = torch.device("cuda")
    way = Way(error, torch.float32, compat.autocast_context(precision, device), precision == "amp", device=device)
    assert_agrees(one_step(name, way), plain_step(name), error)


@functools.cache
def compiled_model(learns_logit_scale: bool, logit_bias: float | None, views: int) -> nn.Module:
    """One for all losses that train the same of the model: compiling takes seconds."""
    names = [name for name in LOSSES if needs_of_model(name) == (learns_logit_scale, logit_bias, views)]
    model = tiny_model()
    prepare(model, tiny_loss(names[0]))
    return torch.compile(model.double(), backend="aot_eager")


def needs_of_model(name: str) -> tuple[bool, float | None, int]:
    loss = tiny_loss(name)
    return loss.learns_logit_scale, loss.initial_logit_bias, loss.views


@pytest.mark.parametrize("name", LOSSES)
def test_a_compiled_model_gives_the_same(name):
    compiled = compiled_model(*needs_of_model(name))
    compiled.zero_grad()
    assert_agrees(one_step(name, Way(EXACT, micro_batches=2), compiled), plain_step(name), EXACT)


@pytest.mark.parametrize("name", ["openclip", "fastclip", "neuclip"])
def test_a_compiled_step_does_not_compile_again(name):
    """The loss counts its calls; the model, which is what is compiled, must not depend on the count."""
    torch._dynamo.reset()
    training = TinyTraining(name, tiny.Way(micro_batches=2, compiled=True))
    for number in range(3):
        training.take(number)
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert graphs > 0
    for number in range(3, 7):
        training.take(number)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == graphs


@pytest.mark.inductor
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
def test_inductor_gives_the_same():
    model = tiny_model()
    prepare(model, tiny_loss("neuclip"))
    compiled = torch.compile(model.double())
    assert_agrees(one_step("neuclip", Way(1e-9), compiled), plain_step("neuclip"), 1e-9)


@pytest.mark.parametrize("name", ["fastclip", "fastclip-v2", "amorlip", "neuclip", "queueclip"])
def test_a_loss_survives_being_compiled_itself(name):
    """--torchcompile leaves it alone. It counts its calls, so that Dynamo compiles again and again and then gives up."""
    torch._dynamo.reset()
    plain, inside = CASES[name].create().double(), CASES[name].create().double()
    compiled = torch.compile(inside, backend="eager")
    # Under Dynamo torch's AdaGrad is not the fused one, which rounds differently.
    tolerance = CASES[name].tolerance
    with torch._dynamo.config.patch(recompile_limit=2):
        for step in make_steps(4):
            expected, expected_gradients = run_step(plain, step)
            value, gradients = run_step(compiled, step)
            for actual, wanted in zip((value, *gradients), (expected, *expected_gradients), strict=True):
                torch.testing.assert_close(actual, wanted, rtol=tolerance, atol=tolerance)
    assert inside.calls == plain.calls == 4
    for key, state in tensors(plain.state_dict()).items():
        torch.testing.assert_close(
            tensors(inside.state_dict())[key], state, rtol=tolerance, atol=tolerance, equal_nan=True
        )


# --- the command line ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["fp32", "amp", "amp_bf16", "bf16", "pure_bf16"])
def test_precisions_from_the_command_line(shards, tmp_path, precision, monkeypatch):
    """On a CPU ``amp`` autocasts to bfloat16, as PyTorch does there, and scales gradients."""
    compiled = []

    def compile_quickly(model: nn.Module) -> nn.Module:
        compiled.append(model)
        return original(model, backend="eager")

    original = torch.compile
    monkeypatch.setattr(torch, "compile", compile_quickly)
    more = [
        "--precision",
        precision,
        "--torchcompile",
        "--grad-checkpointing",
        "--accum-freq",
        "2",
        "--batch-size",
        "8",
    ]
    assert run(command(shards, tmp_path, "run", "neuclip", *more, "--epochs", "1")) == 0
    assert len(compiled) == 1
    lines = metrics_of(tmp_path / "run")
    assert [line["step"] for line in lines] == list(range(5))
    assert lines[-1]["infonce"] == pytest.approx(lines[-1]["chance"], abs=0.5)  # five steps do not go astray
    saved = torch.load(tmp_path / "run" / "checkpoints" / "epoch_1.pt", weights_only=True)
    assert ("scaler" in saved) == (precision == "amp")
    assert not any(name.startswith("_orig_mod") for name in saved["state_dict"])
