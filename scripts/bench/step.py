"""Compare the time of an optimizer step with each loss and with OpenCLIP's loss, in one run, with data in memory.

    python -m scripts.bench.step [--model demo-resnet] [--batch-size 64] [--losses neuclip fastclip] [--output results.json]
    python -m scripts.bench.step --model ViT-B-32 --captions cc3m --script --losses openclip queueclip --steps 1 --rounds 3

The losses alternate in blocks of steps. Each ratio is the median over all rounds. All options except --prototypes keep their
defaults. With --script, the baseline is ``train_one_epoch`` of open_clip_train, and ``floor`` is a step without padding whose
loss costs nothing: forward and backward pass of the towers, and the optimizer's step.
"""

import argparse
import types
from functools import partial

import open_clip
import torch
from open_clip_train.params import parse_args
from open_clip_train.train import train_one_epoch
from torch import nn

from openclip_ext import compat
from openclip_ext.data.text_groups import group_texts
from openclip_ext.model_configs import add_model_configs
from openclip_ext.training.config import OptimizerConfig
from openclip_ext.training.optimizer import create_optimizer
from openclip_ext.training.step import Batch, StepSettings, TrainStep
from scripts.bench import harness
from scripts.bench.captions import caption_lengths

BASELINE, SCRIPT = "openclip", "open_clip_train"
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
    settings = StepSettings(device, open_clip.get_input_dtype(args.precision), autocast, groups_texts=True)
    return TrainStep(model, loss, optimizer, settings)


class ScriptSteps:
    """Steps of ``open_clip_train.train.train_one_epoch`` with ``ClipLoss``, on the same batches."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.step = make_candidate(BASELINE, args)
        self.model, self.loss = self.step.model, open_clip.ClipLoss()
        self.args = parse_args(["--precision", args.precision, "--log-every-n-steps", "1000000"])
        self.args.__dict__ |= {"device": args.device, "distill": False, "rank": 0, "world_size": 1, "wandb": False}

    def __call__(self, batches: list[Batch]) -> None:
        loader = InMemory((batch["image"], batch["text"]) for batch in batches)
        loader.num_batches, loader.num_samples = len(loader), sum(len(images) for images, _ in loader)
        data = {"train": types.SimpleNamespace(dataloader=loader, set_epoch=lambda epoch: None)}
        options = {"scheduler": lambda step: None, "dist_model": None, "args": self.args}
        train_one_epoch(self.model, data, self.loss, 0, self.step.optimizer, None, **options)


class InMemory(list):
    """Batches with the attributes of OpenCLIP's loaders."""

    num_batches: int
    num_samples: int


def floor(step: TrainStep, batches: list[Batch]) -> None:
    """Take steps whose loss is the sum of the features."""
    for batch in batches:
        step.optimizer.zero_grad()
        outputs = step.model(batch["image"], batch["text_groups"])
        (outputs["image_features"].sum() + outputs["text_features"].sum()).backward()
        step.optimizer.step()


def make_batches(model: nn.Module, args: argparse.Namespace) -> list[Batch]:
    generator = torch.Generator().manual_seed(0)
    size = model.visual.image_size
    lengths = caption_lengths(args.captions, 4 * args.batch_size).clip(max=model.context_length)
    height, width = size if isinstance(size, tuple) else (size, size)
    batches = []
    for own in lengths.reshape(4, -1):
        text = torch.randint(1, 1000, (args.batch_size, model.context_length), generator=generator)
        for row, length in zip(text, own.tolist(), strict=True):
            row[length:] = 0
            row[length - 1] = 49407  # the end-of-text token
        batch = {
            "image": torch.randn(args.batch_size, 3, height, width, generator=generator),
            "text": text,
            "index": torch.randint(0, NUM_SAMPLES, (args.batch_size,), generator=generator),
        }
        if args.text_groups > 1:
            batch["text_groups"] = group_texts(text, args.text_groups)
        batches.append(compat.map_tensors(lambda tensor: tensor.to(args.device), batch))
    return batches


def measure(args: argparse.Namespace) -> dict[str, harness.Table]:
    add_model_configs()
    names = [BASELINE, *[name for name in args.losses if name != BASELINE]]
    candidates = {name: make_candidate(name, args) for name in names}
    batches = make_batches(candidates[BASELINE].model, args)
    block = [batches[number % len(batches)] for number in range(args.steps)]
    runs = {name: partial(run, step) for name, step in candidates.items()}
    if args.script:
        runs = {SCRIPT: ScriptSteps(args), **runs, "floor": partial(floor, make_candidate(BASELINE, args))}
    blocks = {name: partial(take, block) for name, take in runs.items()}
    results = harness.take_turns(blocks, SCRIPT if args.script else BASELINE, args)
    groups = [batch["text_groups"] for batch in batches if "text_groups" in batch]
    share = sum(group.num_positions for group in groups) / sum(batch["text"].numel() for batch in batches)
    for name, take in runs.items():
        results[name]["ms"] /= len(block)
        results[name]["text_positions"] = 1.0 if name == SCRIPT or not groups else share
        if args.device.startswith("cuda"):  # on a CPU, allocator noise exceeds the differences
            results[name]["peak_mib"] = harness.peak_mib(partial(take, block[:1]), args.device)
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
    parser.add_argument(
        "--captions", default="padded", help="lengths: padded, cc3m, cc12m, or shards such as 'train/*.tar'"
    )
    parser.add_argument("--text-groups", type=int, default=4)
    parser.add_argument("--script", action="store_true", help="compare with open_clip_train's loop")
    harness.add_losses(parser)


if __name__ == "__main__":
    harness.main(__doc__, add_arguments, measure, baseline=f"{SCRIPT} with --script, else {BASELINE}")
