"""``openclip-ext plan`` predicts the sizes of real states, and the communication of two real ranks."""

import shlex
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from typing import Any
from unittest import mock

import open_clip
import pytest
import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from openclip_ext import compat, distributed
from openclip_ext.contrastive.loss import ContrastiveLoss
from openclip_ext.diagnostics import plan
from openclip_ext.diagnostics.dry_run import (
    ALL_GATHER,
    ALL_REDUCE,
    REDUCE_SCATTER,
    SEND,
    PeakMemory,
    activation_bytes,
    dry_run,
)
from openclip_ext.diagnostics.plan import Plan, Training
from openclip_ext.losses.registry import create_loss, list_losses
from openclip_ext.model_configs import add_model_configs
from openclip_ext.training.guard import StepGuard
from openclip_ext.training.optimizer import create_optimizer
from openclip_ext.training.step import StepSettings, TrainStep
from tests.distributed.pool import two_ranks
from tests.training.tiny import BATCH, OPTIMIZER, WIDTH, parts_of, prepare, tensors, tiny_batch, tiny_model

MODEL = "demo-vit"
# Every loss with some options, and additional combinations of parts.
CASES: dict[str, dict[str, Any]] = {
    **{name: {} for name in list_losses()},
    "amorlip": {"fit_every": 3, "previous_weight": 0.0},
    "neuclip": {"prototypes": 24, "restart_every": 2},
    "queueclip": {"prototypes": 24},
}
STEPS = {"amorlip": 3}


def training(name: str, **changed: Any) -> Training:
    values = {"loss": name, "options": CASES[name], "model": MODEL, "samples": 1000, "global_batch": BATCH}
    return Training(**(values | changed))


def planned(name: str, world_size: int = 1, **changed: Any) -> Plan:
    add_model_configs()
    return Plan(training(name, **changed), world_size, 1e12)


def create(name: str, **more: Any) -> ContrastiveLoss:
    common = {"local_loss": True, "gather_with_grad": True} if name == "openclip" else {}
    return create_loss(name, embed_dim=WIDTH, num_samples=40, **common, **(CASES[name] | more))


@pytest.mark.parametrize("name", list_losses())
def test_state_is_that_of_the_real_loss(name, monkeypatch):
    monkeypatch.setattr(plan, "activation_bytes", lambda *_: (1, 2))  # counting the model's activations takes a second
    whole = planned(name)
    for world_size in (1, 4):
        row = whole.row(world_size)
        monkeypatch.setattr(distributed, "world_size", lambda size=world_size: size)
        real = training(name).create_loss(whole.embed_dim, samples=1000)
        assert row.state == sum(tensor.nbytes for tensor in tensors(real.state_dict()).values())


def _counted(name: str) -> dict[str, int]:
    """Train a few steps on this rank; return the bytes of each kind of communication through ``torch.distributed``."""
    counts: Counter = Counter()
    isend = dist.isend
    sizes = {
        "all_gather_into_tensor": (ALL_GATHER, lambda result, tensor: result.nbytes),
        "all_gather": (ALL_GATHER, lambda results, tensor, *_: sum(result.nbytes for result in results)),
        "all_reduce": (ALL_REDUCE, lambda tensor: tensor.nbytes),
        # With gloo, the backward pass of OpenCLIP's gather uses scatter.
        "scatter": (REDUCE_SCATTER, lambda own, parts=None, *_: sum(part.nbytes for part in parts or [])),
        "batch_isend_irecv": (SEND, lambda ops: sum(op.tensor.nbytes for op in ops if op.op is isend)),
    }

    def counting(function: Callable, kind: str, size: Callable) -> Callable:
        def call(*args: Any, **options: Any) -> Any:
            counts[kind] += size(*args)
            return function(*args, **options)

        return call

    loss = create(name)
    model = tiny_model()
    prepare(model, loss)
    optimizer = create_optimizer(model, OPTIMIZER, loss.logit_scale_lr, loss.model_head())
    step = TrainStep(model, loss, optimizer, StepSettings(torch.device("cpu"), input_dtype=torch.float32))
    loss.start_epoch(0)
    with ExitStack() as patches:
        patches.enter_context(mock.patch.object(distributed, "check_equal_sizes"))  # only CPU ranks do this
        for function, (kind, size) in sizes.items():
            patches.enter_context(mock.patch.object(dist, function, counting(getattr(dist, function), kind, size)))
        for number in range(STEPS.get(name, 1)):
            step([parts_of(tiny_batch(number, loss.views), 2)[dist.get_rank()]])
    return dict(counts)


@pytest.mark.parametrize("name", list(CASES))
def test_communication_is_what_two_ranks_send(name):
    steps = STEPS.get(name, 1)
    exchanged = dry_run(lambda: create(name), BATCH // 2, WIDTH, 2, steps).exchanged
    for rank in two_ranks().run(_counted, name):
        assert {kind: round(steps * size) for kind, size in exchanged.items()} == {k: v for k, v in rank.items() if v}
    assert exchanged
    assert dry_run(lambda: create(name), BATCH, WIDTH, 1).exchanged == {}


@pytest.mark.parametrize("name", ["openclip", "fastclip", "amorlip", "neuclip", "simclr"])
def test_a_run_without_values_works_in_the_memory_of_a_real_one(name):
    torch.manual_seed(0)
    features = [torch.nn.functional.normalize(torch.randn(64, WIDTH), dim=1).requires_grad_() for _ in range(2)]
    loss, scale, memory = create(name), torch.tensor(10.0, requires_grad=True), PeakMemory()
    index = torch.arange(64) % 40
    with memory:
        guard = StepGuard(torch.nn.Module(), loss)
        guard.before_loss()
        sum(loss(*features, scale, index=index, output_dict=True).values()).backward()
    # The peaks are only nearly equal, because some integer sums and checks of indices run on one device only.
    assert dry_run(lambda: create(name), 64, WIDTH, 1).work_bytes == pytest.approx(memory.peak, rel=0.05)


def allocated(name: str, precision: str, grad_checkpointing: bool, views: int) -> int:
    """Return the peak bytes of a forward and backward pass in PyTorch's profiler, plus the bytes of the images."""
    model = open_clip.create_model(name, output_dict=True).train()
    model.set_grad_checkpointing(grad_checkpointing)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    images, texts = torch.rand(24 * views, 3, 32, 32), torch.randint(1, 1000, (24, model.context_length))

    def run() -> None:
        with compat.autocast_context(precision, torch.device("cpu"))():
            outputs = model(images, texts if views == 1 else None)
        features = [outputs["image_features"], outputs["text_features"]][: 3 - views]
        torch.autograd.backward(features, [torch.ones_like(value) for value in features])

    run()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        run()
    now = peak = 0
    for event in profiler.profiler.kineto_results.events():
        if event.name() == "[memory]":
            now += event.nbytes()
            peak = max(peak, now)
    return peak + images.nbytes


@pytest.mark.parametrize(
    ("name", "precision", "grad_checkpointing", "views"),
    [
        ("demo-vit", "fp32", False, 1),
        ("demo-vit", "fp32", True, 1),
        ("demo-vit", "amp_bf16", False, 1),
        ("demo-resnet", "fp32", False, 1),
        ("demo-vit", "fp32", False, 2),
    ],
)
def test_activations_are_what_a_pass_allocates(name: str, precision: str, grad_checkpointing: bool, views: int):
    add_model_configs()
    model = open_clip.create_model(name, device="meta", output_dict=True)
    (needed,) = activation_bytes(model, [24], precision, grad_checkpointing, views)
    assert needed == pytest.approx(allocated(name, precision, grad_checkpointing, views), rel=0.02)


def test_two_views_are_planned_without_the_text_tower():
    one, two = planned("openclip", 2).asked, planned("simclr", 2).asked
    model = open_clip.create_model(MODEL, device="meta")
    trained = sum(parameter.numel() for parameter in model.visual.parameters())
    frozen = sum(parameter.numel() for parameter in model.parameters()) - trained
    assert (two.model, two.gradient) == (4 * (5 * trained + frozen), {ALL_REDUCE: 4.0 * trained})
    assert one.model == 4 * 5 * (trained + frozen)
    of_view = activation_bytes(
        open_clip.create_model(MODEL, device="meta", output_dict=True), [BATCH // 2], "amp", views=2
    )
    assert two.activations == pytest.approx(of_view[0], abs=1)


def test_openclips_loss_composed_of_parts_needs_less_memory():
    whole = Training("openclip", {}, MODEL, 10**6, 16384)
    composed = replace(whole, options={"normalizer": "minibatch"})
    needed = [dry_run(lambda one=one: one.create_loss(64), 16384, 64, 1).work_bytes for one in (whole, composed)]
    assert needed[1] < needed[0] / 3


# --- the report -------------------------------------------------------------------------------------------------------

COMMAND = ["--samples", "1e9", "--world-size", "64", "--global-batch", "5120", "--model", MODEL]


def test_a_plan_for_a_billion_samples(capsys):
    plan.main([*COMMAND, "--loss", "fastclip", "--gpu-memory", "0.2"])
    text = capsys.readouterr().out
    assert "n = 1,000,000,000, global batch 5120, 64 ranks" in text
    assert "WARNING: 64 ranks: a GPU needs" in text and "does not fit" in text
    assert "0.116 GiB a GPU (7.451 GiB in all, 8 bytes each)" in text
    lines = text[text.index("ranks  batch") :].splitlines()[1:]
    table = {int(line.split()[0]): line.split() for line in lines if line.split()[0].isdigit()}
    assert list(table) == [2**power for power in range(11)]
    assert float(table[1][4]) == pytest.approx(8e9 / 2**30, abs=0.01)
    assert table[64][1] == "80"
    # With B = 5120 and d = 64, a step gathers 2·B·d values, 2·B scalars and B indices. It reduces 2·B + 2 scalars.
    gathered, reduced = (2 * 5120 * 64 + 2 * 5120) * 4 + 5120 * 8, 2 * 5120 * 4 + 2 * 4
    assert float(table[64][7]) == pytest.approx((gathered + 2 * reduced) * 63 / 64 / 2**20, abs=0.01)


def test_the_plan_says_which_batch_fits(capsys, monkeypatch):
    # This saves time, because OpenCLIP's gather has one operation per rank.
    monkeypatch.setattr(plan, "LARGEST_WORLD", 2)
    sizes = ["--samples", "1e6", "--global-batch", "4096", "--gpu-memory", "1"]
    command = [*sizes, "--model", MODEL, "--loss", "openclip"]
    plan.main(command)
    text = capsys.readouterr().out
    assert "without these flags, each rank stores a full B x B matrix" in text
    largest = int(text.partition("does not fit; up to ")[2].split()[0])
    assert 512 <= largest < 4096
    plan.main([*command, "--accum-freq", "8", "--precision", "fp32"])
    text = capsys.readouterr().out
    assert ": fits; up to" in text and "WARNING" not in text


def test_doctor_sees_the_micro_batches_of_the_run():
    """Only the plan asks whether one large micro-batch fits."""
    loading = plan.run_to_plan(["--global-batch", "256", "--dataset-type", "synthetic"], world_size=2).loading
    assert (loading.batch_size, loading.accum_freq) == (64, 2)


def test_mistakes_are_named():
    for arguments, message in (
        (["--model", "ViT-B-17"], "--model ViT-B-17: expected one of"),
        (["--loss", "neuclip", "--gamma", "0.5"], "--gamma: not used by the loss 'neuclip"),
        (["--world-size", "48"], "a multiple of the number of processes, 48"),
    ):
        with pytest.raises(ValueError, match=message):
            plan.main([*COMMAND, *arguments])


@pytest.mark.parametrize("given", [["--samples", "1e4"], ["--train-data"]])
def test_the_flags_of_train_describe_the_run(given, shards, capsys):
    flags = shlex.split("--model demo-vit --batch-size 8 --accum-freq 2 --world-size 2 --precision fp32 --lr 1e-3")
    data = [shards] if given == ["--train-data"] else []
    plan.main([*flags, *given, *data])
    samples = "84" if data else "10,000"
    assert f"n = {samples}, global batch 32, 2 ranks" in capsys.readouterr().out
