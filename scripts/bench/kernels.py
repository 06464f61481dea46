"""Operations of a step of the losses alone, forward and backward: on a GPU each is a kernel to launch, at least one.

    python scripts/bench/kernels.py [--batch-size 64] [--losses fastclip neuclip] [--output FILE]

Counted are the operations that torch dispatches, but for views, allocations and questions about types. ``cpu`` is the path of
a CPU, and ``meta`` that of any other device: a GPU's, without one. The number is the largest of some steps of epoch 1, not the
first of a run; options of a loss are its defaults. It is the same on every machine. On other devices than a CPU every 64th
step also sorts out which samples were not finite: a dozen operations that are not counted.
"""

import argparse
import warnings
from typing import Any

import harness
import torch
from torch.nn.functional import normalize
from torch.utils._python_dispatch import TorchDispatchMode

from openclip_ext.contrastive.checks import CHECKED_CALLS

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


def count_operations(name: str, args: argparse.Namespace, device: str) -> int:
    """Return the largest number of some steps of epoch 1, after those with checks of the loop."""
    random = torch.Generator().manual_seed(0)
    features = normalize(torch.randn(2, args.batch_size, args.embed_dim, generator=random), dim=2).to(device)
    inputs = [side.clone().requires_grad_() for side in features]
    inputs.append(torch.tensor(1 / 0.07, device=device, requires_grad=True))
    index = torch.arange(args.batch_size, device=device)
    loss = harness.create_loss(name, args, args.embed_dim, args.batch_size, device)
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


def measure(args: argparse.Namespace) -> dict[str, harness.Table]:
    return {"": {name: {device: count_operations(name, args, device) for device in DEVICES} for name in args.losses}}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--embed-dim", type=int, default=64)
    harness.add_losses(parser, prototypes=1024)


if __name__ == "__main__":
    harness.main(__doc__, add_arguments, measure)
