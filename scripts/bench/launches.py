"""Count kernel launches and host-device syncs of a training step with each loss, with PyTorch's profiler.

    python -m scripts.bench.launches [--losses neuclip fastclip] [--output launches.json]

The steps are the same as in ``tests/fake_cuda``, which counts operations without a GPU. The model is tiny, because only the
number of launches matters. The column *fake* is the count of ``tests/fake_cuda``, and the column *waits* the number of syncs.
The count of ``tests/fake_cuda`` may differ from the launches, because an operation may launch several kernels or none.
"""

import argparse
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from openclip_ext.losses import registry
from openclip_ext.training.optimizer import create_optimizer
from openclip_ext.training.step import StepSettings, TrainStep
from scripts.bench import harness
from tests.fake_cuda import bounds
from tests.fake_cuda.test_losses import CALLS, SOLVES_FROM
from tests.training.tiny import OPTIMIZER, prepare, tiny_batch, tiny_loss, tiny_model

# Beginnings of the names of calls that launch work, such as cudaLaunchKernelExC.
LAUNCHES = ("cudaLaunchKernel", "cuLaunchKernel", "cudaMemcpyAsync", "cudaMemsetAsync")
SYNCS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cudaMemcpy")


def count_calls(name: str, device: torch.device) -> list[dict[str, int]]:
    """Take a few steps; return the number of CUDA runtime calls in each step, by name."""
    model, loss = tiny_model("vit", layers=1).to(device), tiny_loss(name, **bounds.options(name)).to(device)
    prepare(model, loss)
    optimizer = create_optimizer(model, OPTIMIZER, loss.logit_scale_lr, loss.model_head())
    step = TrainStep(model, loss, optimizer, StepSettings(device))
    found = []
    for number in range(CALLS + 2):
        loss.start_epoch(number // 2)
        loss.calls += number == 1 and SOLVES_FROM
        batch: Any = tiny_batch(number, loss.views)
        if loss.needs_positives:
            batch["caption_hash"] = batch["index"] % 3
        if device.type == "cuda":
            batch = {key: value.pin_memory() for key, value in batch.items()}
            torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiled:
            step([batch], number)
        found.append({event.key: event.count for event in profiled.key_averages() if event.key.startswith("cu")})
    return found


def measure(args: argparse.Namespace) -> dict[str, harness.Table]:
    table: harness.Table = {}
    for name in args.losses:
        steps = count_calls(name, torch.device(args.device))[1:]  # the first step also creates the optimizer's state
        table[name] = {
            "launches": max(sum(step[call] for call in step if call.startswith(LAUNCHES)) for step in steps),
            "waits": max(sum(step.get(call, 0) for call in SYNCS) for step in steps),
            "fake": bounds.measured()["step"][name],
        }
        print(name, steps[-1], flush=True)
    return {"": table}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--losses", nargs="+", default=registry.list_losses())


if __name__ == "__main__":
    harness.main(__doc__, add_arguments, measure, baseline="fake")
