"""Compare the time of an optimizer step with each loss and with OpenCLIP's loss, in one run, with data in memory.

    python -m scripts.bench.step [--model demo-resnet] [--batch-size 64] [--losses neuclip fastclip] [--output results.json]

The losses alternate in blocks of steps. Each ratio is the median over all rounds. All options except --prototypes keep their
defaults.
"""

import argparse
from functools import partial

import open_clip
import torch
from torch import nn

from openclip_ext import compat
from openclip_ext.model_configs import add_model_configs
from openclip_ext.training.config import OptimizerConfig
from openclip_ext.training.optimizer import create_optimizer
from openclip_ext.training.step import Batch, StepSettings, TrainStep
from scripts.bench import harness

BASELINE = "openclip"
NUM_SAMPLES = 20_000


def make_candidate(loss_name: str, args: argparse.Namespace) -> TrainStep:
    torch.manual_seed(0)
    device = torch.device(args.device)
    start = compat.SIGLIP_START if loss_name == "siglip" else {}
    model = open_clip.create_model(args.model, output_dict=True, device=device, **start).train()
    loss = harness.create_loss(loss_name, args, compat.embedding_dim(args.model, model), NUM_SAMPLES, device)
    if not loss.learns_logit_scale:
        model.logit_scale.requires_grad_(False)
    config = OptimizerConfig(name="adamw", lr=1e-3, weight_decay=0.1, beta1=0.9, beta2=0.98, eps=1e-6)
    optimizer = create_optimizer(model, config, loss.logit_scale_lr, loss.model_head())
    autocast = compat.autocast_context(args.precision, device)
    settings = StepSettings(device, open_clip.get_input_dtype(args.precision), autocast)
    return TrainStep(model, loss, optimizer, settings)


def make_batches(model: nn.Module, args: argparse.Namespace) -> list[Batch]:
    generator = torch.Generator().manual_seed(0)
    size = model.visual.image_size
    height, width = size if isinstance(size, tuple) else (size, size)
    batches = []
    for _ in range(4):
        text = torch.randint(1, 1000, (args.batch_size, model.context_length), generator=generator)
        text[:, -1] = 49407  # the end-of-text token
        batch = {
            "image": torch.randn(args.batch_size, 3, height, width, generator=generator),
            "text": text,
            "index": torch.randint(0, NUM_SAMPLES, (args.batch_size,), generator=generator),
        }
        batches.append({key: value.to(args.device) for key, value in batch.items()})
    return batches


def measure(args: argparse.Namespace) -> dict[str, harness.Table]:
    add_model_configs()
    names = [BASELINE, *[name for name in args.losses if name != BASELINE]]
    candidates = {name: make_candidate(name, args) for name in names}
    batches = make_batches(candidates[BASELINE].model, args)
    block = [batches[number % len(batches)] for number in range(args.steps)]
    blocks = {name: partial(run, step, block) for name, step in candidates.items()}
    results = harness.take_turns(blocks, BASELINE, args)
    for name, step in candidates.items():
        results[name]["ms"] /= len(block)
        if args.device.startswith("cuda"):  # on a CPU, allocator noise exceeds the differences
            results[name]["peak_mib"] = harness.peak_mib(partial(run, step, block[:1]), args.device)
    return {"": results}


def run(step: TrainStep, batches: list[Batch]) -> None:
    for number, batch in enumerate(batches):
        step([batch], number)
        step.guard.poll_outcomes()  # limits how many steps the host is ahead of the GPU, as in training


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="demo-resnet")
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--steps", type=int, default=20, help="number of steps per block")
    parser.add_argument("--precision", default="fp32")
    harness.add_losses(parser)


if __name__ == "__main__":
    harness.main(__doc__, add_arguments, measure, baseline=BASELINE)
