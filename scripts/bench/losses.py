"""Time and memory of the losses alone, forward and backward, over those of ``open_clip.ClipLoss`` at the same batch.

    python scripts/bench/losses.py [--batch-sizes 512 4096] [--embed-dim 512] [--losses fastclip neuclip] [--output FILE]

Random unit features on one device; options of a loss are its defaults, but for --prototypes. The losses take turns, round
after round; a ratio is the median over the rounds. On a busy machine, --cpu-time compares processor time. Memory is what a
call needs beyond features and state.
"""

import argparse
import os
from functools import partial
from pathlib import Path

import torch
from _losses import IMAGE_TEXT_LOSSES, prototypes_option
from _report import hardware, write_report
from _turns import CLOCKS, Action, peak_mib, print_turns, take_turns
from open_clip.loss import ClipLoss
from torch.nn.functional import normalize

from openclip_ext import compat
from openclip_ext.losses import registry

BASELINE = "ClipLoss"


def make_contestants(batch_size: int, args: argparse.Namespace) -> dict[str, Action]:
    random = torch.Generator().manual_seed(0)
    features = [
        normalize(torch.randn(batch_size, args.embed_dim, generator=random), dim=1).to(args.device).requires_grad_()
        for _ in range(2)
    ]
    inputs = [*features, torch.tensor(1 / 0.07, device=args.device, requires_grad=True)]
    index = torch.arange(batch_size, device=args.device)
    sizes = {"embed_dim": args.embed_dim, "num_samples": batch_size}
    losses = {
        name: registry.create_loss(name, **sizes, **prototypes_option(name, args.prototypes)).to(args.device)
        for name in args.losses
    }
    with_index = {name: partial(call, partial(loss, *inputs, index=index), inputs) for name, loss in losses.items()}
    return {BASELINE: partial(call, partial(ClipLoss(), *inputs), inputs), **with_index}


def call(forward: Action, inputs: list[torch.Tensor]) -> None:
    """Forward and backward, as in a step."""
    for tensor in inputs:
        tensor.grad = None
    forward().backward()


def measure(batch_size: int, args: argparse.Namespace) -> dict[str, dict[str, float]]:
    contestants = make_contestants(batch_size, args)
    results = take_turns(contestants, BASELINE, args.rounds, args.device, CLOCKS[args.cpu_time])
    for name, action in contestants.items():
        results[name]["peak_mib"] = peak_mib(action, args.device)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batch-sizes", nargs="+", type=int, default=[512, 4096])
    parser.add_argument("--embed-dim", type=int, default=512)
    parser.add_argument("--losses", nargs="+", default=IMAGE_TEXT_LOSSES, choices=IMAGE_TEXT_LOSSES)
    parser.add_argument("--prototypes", type=int, default=4096, help="of the losses that have them")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--cpu-time", action="store_true", help="processor time instead of wall-clock time")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--output", type=Path, help="write the numbers as JSON")
    args = parser.parse_args()
    compat.set_backends()
    print(f"{hardware(args.device)}, load {os.getloadavg()[0]:.1f}")
    results = {}
    for batch_size in args.batch_sizes:
        print(f"\nbatch {batch_size}, width {args.embed_dim}")
        results[str(batch_size)] = measure(batch_size, args)
        print_turns(results[str(batch_size)])
    if args.output is not None:
        settings = {name: value for name, value in vars(args).items() if name != "output"}
        write_report(args.output, settings, results, args.device, baseline=BASELINE)


if __name__ == "__main__":
    main()
