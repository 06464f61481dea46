"""Training tests for a GPU. They also run on the CPU, which finds mistakes in the tests themselves."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import nn

from openclip_ext import distributed
from openclip_ext.checkpoint.format import random_state, set_random_state
from openclip_ext.contrastive.loop_checks import CHECKED_CALLS
from openclip_ext.training import parallel
from openclip_ext.training.ema import ModelEma
from openclip_ext.training.optimizer import create_optimizer
from openclip_ext.training.step import StepSettings, TrainStep
from tests.devices import CAN_SHARD, CPU, all_on_a_gpu, on_each_device, refusing_to_wait
from tests.training.runs import losses_of, train
from tests.training.tiny import LOSSES, OPTIMIZER, TinyTraining, Way, assert_close, parts_of, tiny_batch

STEPS = CHECKED_CALLS + 3
WAYS = {
    "plain": Way(dtype=torch.float64),
    "accumulated": Way(dtype=torch.float64, micro_batches=2, clip=0.1),
    "resnet": Way(dtype=torch.float64, tower="resnet"),
    "scaled": Way(dtype=torch.float64, scale=2.0**4, clip=0.1),
}
_CASES = [(name, "plain") for name in LOSSES if name != "tempnet"]  # TempNet's dropout differs between devices
_CASES += [(name, way) for name in ("openclip", "neuclip") for way in ("accumulated", "resnet", "scaled")]
_CASES += [("fastclip-v2", way) for way in WAYS if way != "plain"]


def training_on(device: torch.device, name: str, way: Way) -> TinyTraining:
    training = TinyTraining(name, replace(way, device=device))
    training.step.ema = ModelEma(training.model, 0.9)
    training.step.loss.start_epoch(0)
    return training


def take(training: TinyTraining, number: int, bad: bool = False) -> None:
    batch = training.batch(number)
    batch["image"] = batch["image"].double()
    if bad:
        batch["image"][-1] = float("nan")
    if training.way.device.type == "cuda":
        batch = {name: value.pin_memory() for name, value in batch.items()}
    # In its first calls, the loss checks the training loop for mistakes, and these checks sync.
    with refusing_to_wait(training.way.device if number >= CHECKED_CALLS else CPU):
        training.step(parts_of(batch, training.way.micro_batches), number)


def everything(training: TinyTraining) -> dict[str, torch.Tensor]:
    """Return copies of all tensors on the host, without counters: on a GPU, counters include skipped steps."""
    state = training.state() | {f"ema.{name}": value for name, value in training.step.ema.state_dict().items()}
    return {name: value.detach().cpu().clone() for name, value in state.items() if not name.endswith("_extra_state")}


@pytest.mark.parametrize(
    ("name", "way", "device"), all_on_a_gpu(_CASES, [("neuclip", "scaled"), ("fastclip-v2", "accumulated")])
)
def test_steps_do_not_wait_and_end_where_the_cpus_end(name, way, device):
    """One step is non-finite. It is skipped on the device, and the host receives the report later, without a sync."""
    results = []
    for where in (device, CPU):
        training = training_on(where, name, replace(WAYS[way], on_device=True))
        for number in range(STEPS):
            take(training, number)
        before = everything(training)
        take(training, STEPS, bad=True)
        assert_close(everything(training), before, rtol=0, atol=0)
        (skipped,) = training.step.guard.poll_outcomes(wait=True)
        last = training.batch(STEPS)["index"].tolist()[-1:]
        assert (skipped.number, skipped.samples, skipped.are_bad) == (STEPS, last, True)
        take(training, STEPS + 1)
        results.append(everything(training))
    assert_close(*results, rtol=1e-5, atol=1e-7)


@on_each_device
def test_a_resume_finds_the_devices_generator(device):
    state = random_state()
    drawn = torch.rand(5, device=device)
    set_random_state(state)
    assert torch.equal(torch.rand(5, device=device), drawn)


@pytest.mark.parametrize(
    ("more", "device"),
    all_on_a_gpu(
        [("--precision fp32",), ("--accum-freq 2 --batch-size 8 --model-ema-decay 0.9",)],
        [("--accum-freq 2 --batch-size 8 --model-ema-decay 0.9",)],
    ),
)
def test_a_run_is_resumed(shards, tmp_path, device, more):
    more = [*more.split(), "--device", str(device)]
    whole = losses_of(train(shards, tmp_path, "whole", "fastclip", *more))
    resumed = losses_of(train(shards, tmp_path, "resumed", "fastclip", *more, stops=(3,)))
    assert [step for step, *_ in resumed] == list(range(10))
    for ours, theirs in zip(resumed, whole, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-3)


@pytest.fixture
def group_of_one(device, tmp_path):
    """Create a process group with this process as the only rank: NCCL on a GPU, otherwise gloo."""
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        yield
    finally:
        distributed.shutdown()


def _replicated(model: nn.Module, device: torch.device) -> nn.Module:
    return nn.parallel.DistributedDataParallel(model, device_ids=None if device.type == "cpu" else [device])


def _compiled(model: nn.Module, device: torch.device) -> nn.Module:
    return torch.compile(_replicated(model, device), backend="inductor" if device.type == "cuda" else "aot_eager")


def _sharded(model: nn.Module, device: torch.device) -> nn.Module:
    return parallel.ShardedDataParallel(model, device, parallel.ParallelConfig(fsdp=True), keep_whole=False)


WRAPPINGS = {"replicated": _replicated, "sharded": _sharded, "compiled": _compiled}


@pytest.mark.parametrize(("wrapping", "device"), all_on_a_gpu([(name,) for name in WRAPPINGS], [("sharded",)]))
def test_a_wrapped_model_takes_the_same_steps(wrapping, device, group_of_one):
    if wrapping == "sharded" and not CAN_SHARD:
        pytest.skip("this torch shards parameters only on a GPU")
    distributed.set_timeout(distributed.STEP_TIMEOUT)
    losses = []
    for wrap in (None, WRAPPINGS[wrapping]):
        training = TinyTraining("fastclip", Way(device=device))
        model = training.model if wrap is None else wrap(training.model, device)
        optimizer = create_optimizer(model, OPTIMIZER, training.loss.logit_scale_lr, None)
        step = TrainStep(model, training.loss, optimizer, StepSettings(device, grad_clip_norm=0.1))
        losses.append([float(sum(step([tiny_batch(number)], number).values())) for number in range(STEPS)])
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)
