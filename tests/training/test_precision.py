"""A step of every loss in each precision, compiled, with activation checkpointing, and with accumulated gradients."""

import functools
import shutil
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from openclip_ext import compat
from openclip_ext.contrastive.loss import ContrastiveLoss
from tests.training.runs import metrics_of, run, small_command
from tests.training.tiny import (
    BFLOAT16,
    FLOAT16,
    LOSSES,
    TinyTraining,
    Way,
    assert_close,
    tensors,
)

# Maximum relative errors. Rounding to bfloat16 (8 significant bits) has an average error of 0.2 %, and rounding to float16
# (11 bits) 0.02 %. A gradient takes dozens of roundings. In EXACT cases, only the order of additions differs.
EXACT, IN_FLOAT32, IN_FLOAT16, IN_BFLOAT16 = 1e-12, 1e-5, 0.02, 0.1
DOUBLE, MIXED = Way(dtype=torch.float64), Way(autocast=BFLOAT16)
# How a step is computed, and the maximum relative error of loss and gradient compared with the plain float64 step.
WAYS = {
    "accumulated-checkpointed": (replace(DOUBLE, micro_batches=4, checkpointing=True), EXACT),
    "scaled": (replace(DOUBLE, scale=2.0**8, micro_batches=2), EXACT),
    "fp32": (Way(), IN_FLOAT32),
    "amp_bf16-accumulated": (replace(MIXED, micro_batches=2, checkpointing=True), IN_BFLOAT16),
    "amp": (Way(autocast=FLOAT16, scale=2.0**8), IN_FLOAT16),
    "bf16": (Way(dtype=torch.bfloat16, norms_in_float32=True), IN_BFLOAT16),
    "pure_bf16": (Way(dtype=torch.bfloat16), IN_BFLOAT16),
}


# A dict with the loss and the gradient of all parameters (as one vector), and the loss module.
Result = tuple[dict[str, Tensor], ContrastiveLoss]


def one_step(name: str, way: Way) -> Result:
    """Take the first step of a training run; return the loss's value, its gradients and the loss module."""
    training = TinyTraining(name, way)
    terms = training.take(0)
    head = training.loss.model_head()
    parameters = [*training.model.parameters(), *([] if head is None else head.parameters())]
    gradients = [parameter.grad.flatten() for parameter in parameters if parameter.grad is not None]
    numbers = {"value": sum(terms.values()), "gradient": torch.cat([gradient.double() for gradient in gradients])}
    if training.model.logit_scale.grad is not None:
        numbers["gradient of the logit scale"] = training.model.logit_scale.grad
    return {key: number.double().cpu() for key, number in numbers.items()}, training.loss


@functools.cache
def plain_step(name: str) -> Result:
    return one_step(name, DOUBLE)


def assert_agrees(result: Result, expected: Result, error: float) -> None:
    numbers, loss = result
    assert numbers.keys() == expected[0].keys()
    for key, wanted in expected[0].items():
        assert float((numbers[key] - wanted).norm() / wanted.norm().clamp(min=1e-300)) <= error, key
    assert loss.calls == 1  # the loss counts one call per batch, even if the batch has several micro-batches
    state = tensors(loss.state_dict())
    assert not any(torch.isinf(value).any() for value in state.values())
    if error == EXACT:
        assert_close(state, tensors(expected[1].state_dict()), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", LOSSES)
def test_a_step_agrees_with_the_plain_one(name, way):
    computed, error = WAYS[way]
    assert_agrees(one_step(name, computed), plain_step(name), error)


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_checkpointing_does_not_change_batchnorm_statistics(micro_batches):
    plain, checkpointed = (
        TinyTraining("openclip", Way("timm-resnet", 1, micro_batches, checkpointing=checkpointing))
        for checkpointing in (False, True)
    )
    for training in (plain, checkpointed):
        training.take(0)
    assert_close(checkpointed.state(), plain.state(), rtol=0, atol=0)


@pytest.mark.gpu
@pytest.mark.parametrize(("precision", "error"), [("amp", IN_FLOAT16), ("amp_bf16", IN_BFLOAT16)])
@pytest.mark.parametrize("name", [name for name in LOSSES if name != "tempnet"])  # dropout depends on the device
def test_autocast_on_a_gpu(name, precision, error):
    """Test CUDA's autocast, which uses float16 for ``amp``; a CPU's autocast uses bfloat16."""
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    device = torch.device("cuda")
    scale = 2.0**8 if precision == "amp" else None
    way = Way(autocast=compat.autocast_context(precision, device), scale=scale, device=device)
    assert_agrees(one_step(name, way), plain_step(name), error)


# Each of these losses trains other parameters of the model.
@pytest.mark.parametrize("name", ["neuclip", "siglip", "simclr"])
def test_a_compiled_model_gives_the_same(name):
    way = replace(DOUBLE, layers=1)
    assert_agrees(one_step(name, replace(way, micro_batches=2, compiled=True)), one_step(name, way), EXACT)


def test_a_compiled_step_does_not_compile_again():
    """The loss counts its calls. The compiled model must not depend on this count, or every step would compile again."""
    torch._dynamo.reset()
    training = TinyTraining("neuclip", Way(layers=1, micro_batches=2, compiled=True))
    for number in range(3):
        training.take(number)
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert graphs > 0
    for number in range(3, 7):
        training.take(number)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == graphs


@pytest.mark.inductor
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
@pytest.mark.skipif(torch.__version__ < "2.7", reason="inductor of torch 2.6 converts float64 to float32")
def test_inductor_gives_the_same():
    way = replace(DOUBLE, layers=1)
    compiled = replace(way, compiled=True, backend="inductor")
    assert_agrees(one_step("neuclip", compiled), one_step("neuclip", way), 1e-9)


@pytest.mark.inductor
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
def test_a_run_with_a_compiled_loss_equals_one_without(shards, tmp_path):
    runs = {"eager": [], "compiled": ["--compile-loss"]}
    for name, more in runs.items():
        command = small_command(shards, tmp_path, name, "queueclip", *more, "--batch-size", "8", "--epochs", "2")
        torch._dynamo.utils.counters.clear()
        assert run(command) == 0
        graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        assert graphs == len(more) or (more and torch.__version__ < "2.14")
    eager, compiled = (metrics_of(tmp_path / name) for name in runs)
    assert [line["step"] for line in compiled] == [line["step"] for line in eager]
    for line, expected in zip(compiled, eager, strict=True):
        assert line["loss"] == pytest.approx(expected["loss"], rel=1e-4)


# --- the command line -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["amp", "amp_bf16", "bf16", "pure_bf16"])
def test_precisions_from_the_command_line(shards, tmp_path, precision, monkeypatch):
    """On a CPU, ``amp`` uses bfloat16 (PyTorch's default for autocast), and scales the loss."""
    compiled = []

    def compile_quickly(model: nn.Module) -> nn.Module:
        compiled.append(model)
        return original(model, backend="eager")

    original = torch.compile
    monkeypatch.setattr(torch, "compile", compile_quickly)
    compiles = ["--torchcompile"] * (precision == "amp")
    more = ["--precision", precision, *compiles, "--batch-size", "8", "--accum-freq", "2"]
    assert run(small_command(shards, tmp_path, "run", "neuclip", *more, "--grad-checkpointing", "--epochs", "1")) == 0
    assert len(compiled) == len(compiles)
    lines = metrics_of(tmp_path / "run")
    assert [line["step"] for line in lines] == list(range(5))
    assert lines[-1]["infonce"] == pytest.approx(lines[-1]["chance"], abs=0.5)  # the run did not diverge in five steps
    saved = torch.load(tmp_path / "run" / "checkpoints" / "epoch_1.pt", weights_only=True)
    assert ("scaler" in saved) == (precision == "amp")
    assert f"--precision {precision} is slow on many CPUs" in (tmp_path / "run" / "out.log").read_text()
    assert not any(name.startswith("_orig_mod") for name in saved["state_dict"])
