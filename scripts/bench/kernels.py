"""Operations of a step of the losses alone, forward and backward: on a GPU each is a kernel to launch, at least one.

    python scripts/bench/kernels.py [--batch-size 64] [--losses fastclip neuclip] [--output FILE]

Counted are the operations that torch dispatches, but for views, allocations and questions about types. ``cpu`` is the path of
a CPU, and ``meta`` that of any other device: a GPU's, without one. The number is the largest of some steps of epoch 1, not the
first of a run; options of a loss are its defaults. It is the same on every machine. On other devices than a CPU every 64th
step also sorts out which samples were not finite: a dozen operations that are not counted.
"""

import argparse
import warnings
from pathlib import Path
from typing import Any

import torch
from _losses import IMAGE_TEXT_LOSSES, prototypes_option
from _report import write_report
from torch.nn.functional import normalize
from torch.utils._python_dispatch import TorchDispatchMode

from openclip_ext.contrastive.loop_checks import CHECKED_CALLS
from openclip_ext.losses import registry

DEVICES = ("cpu", "meta")
# Some losses fit their networks in every other step.
STEPS = 4
_NO_KERNEL = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "_unsafe_view", "promote_types"}


class OperationCount(TorchDispatchMode):
    """Counts the operations that are dispatched while it is active."""

    def __init__(self) -> None:
        super().__init__()
        self.number = 0

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.number += not (operation.is_view or operation.overloadpacket.__name__ in _NO_KERNEL)
        return operation(*args, **(kwargs or {}))


def count_operations(name: str, batch_size: int, embed_dim: int, prototypes: int, device: str) -> int:
    """The largest number of some steps of epoch 1, after those with checks of the loop."""
    random = torch.Generator().manual_seed(0)
    features = normalize(torch.randn(2, batch_size, embed_dim, generator=random), dim=2).to(device)
    inputs = [side.clone().requires_grad_() for side in features]
    inputs.append(torch.tensor(1 / 0.07, device=device, requires_grad=True))
    index = torch.arange(batch_size, device=device)
    options = prototypes_option(name, prototypes)
    loss = registry.create_loss(name, embed_dim=embed_dim, num_samples=batch_size, **options).to(device)
    loss.start_epoch(1)
    numbers = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # there is no optimizer between the calls
        for _ in range(CHECKED_CALLS + STEPS):
            loss.zero_grad()
            for tensor in inputs:
                tensor.grad = None
            with OperationCount() as count:
                loss(*inputs, index=index).backward()
            numbers.append(count.number)
    return max(numbers[CHECKED_CALLS:])


def measure(args: argparse.Namespace) -> dict[str, dict[str, int]]:
    sizes = (args.batch_size, args.embed_dim, args.prototypes)
    return {name: {device: count_operations(name, *sizes, device) for device in DEVICES} for name in args.losses}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--embed-dim", type=int, default=64)
    parser.add_argument("--losses", nargs="+", default=IMAGE_TEXT_LOSSES, choices=IMAGE_TEXT_LOSSES)
    parser.add_argument("--prototypes", type=int, default=1024, help="of the losses that have them")
    parser.add_argument("--output", type=Path, help="write the numbers as JSON")
    args = parser.parse_args()
    results = measure(args)
    print(f"{'':<14}" + "".join(f"{device:>6}" for device in DEVICES))
    for name, counts in results.items():
        print(f"{name:<14}" + "".join(f"{counts[device]:>6}" for device in DEVICES))
    if args.output is not None:
        settings = {name: value for name, value in vars(args).items() if name != "output"}
        write_report(args.output, settings, results)


if __name__ == "__main__":
    main()
