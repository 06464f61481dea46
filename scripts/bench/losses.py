"""Compare time and memory of each loss (forward and backward, without a model) with ``open_clip.ClipLoss``.

    python -m scripts.bench.losses [--batch-sizes 512 4096] [--embed-dim 512] [--losses fastclip neuclip] [--output FILE]

All losses receive the same random unit features, on one device. All options except --prototypes have their defaults. The
losses alternate. A ratio is the median over the rounds. Losses with solved temperatures are measured after their warm-up.
Memory is the temporary memory of a call, without features and state. It is infinite if the GPU's memory is too small.
``--rounds 0`` measures only memory.
"""

import argparse
import copy
import math
from functools import partial

import torch
from open_clip.loss import ClipLoss

from scripts.bench import harness
from tests.fake_cuda.test_losses import SOLVES_FROM

BASELINE = "ClipLoss"


def make_candidates(batch_size: int, args: argparse.Namespace) -> dict[str, harness.Action]:
    features = [
        side.clone().requires_grad_() for side in harness.unit_features(batch_size, args.embed_dim, args.device)
    ]
    inputs = [*features, torch.tensor(1 / 0.07, device=args.device, requires_grad=True)]
    index = torch.arange(batch_size, device=args.device)
    candidates = {BASELINE: partial(call, partial(ClipLoss(), *inputs), inputs)}
    for name in args.losses:
        loss = harness.create_loss(name, args, args.embed_dim, batch_size, args.device)
        loss.calls += SOLVES_FROM
        candidates[name] = partial(call, partial(loss, *inputs, index=index), inputs)
        if args.compile:
            compiled = copy.deepcopy(loss)
            compiled.compile(fullgraph=True)
            candidates[f"{name}, compiled"] = partial(call, partial(compiled, *inputs, index=index), inputs)
    return candidates


def call(forward: harness.Action, inputs: list[torch.Tensor]) -> None:
    for tensor in inputs:
        tensor.grad = None
    forward().backward()


def measure(args: argparse.Namespace) -> dict[str, harness.Table]:
    tables = {}
    for batch_size in args.batch_sizes:
        candidates = make_candidates(batch_size, args)
        table = harness.take_turns(candidates, BASELINE, args) if args.rounds else {name: {} for name in candidates}
        for name, action in candidates.items():
            try:
                table[name]["peak_mib"] = harness.peak_mib(action, args.device)
            except torch.OutOfMemoryError:
                table[name]["peak_mib"] = math.inf
        tables[str(batch_size)] = table
    return tables


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--batch-sizes", nargs="+", type=int, default=[512, 4096])
    parser.add_argument("--embed-dim", type=int, default=512)
    parser.add_argument("--compile", action="store_true", help="also measure each loss with torch.compile")
    harness.add_losses(parser)


if __name__ == "__main__":
    harness.main(__doc__, add_arguments, measure, baseline=BASELINE)
