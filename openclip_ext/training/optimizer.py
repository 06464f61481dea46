"""The optimizer and its learning rates: OpenCLIP's, with a rate of its own for the temperature where the loss asks."""

import argparse
import itertools
from collections.abc import Callable

import torch
from torch import nn

from openclip_ext import compat, distributed
from openclip_ext.training.errors import UsageError

LOGIT_SCALE = "logit_scale"
LOOKAHEAD = "timm/lookahead_"


def create_optimizer(
    model: nn.Module, args: argparse.Namespace, logit_scale_lr: float | None, head: nn.Module | None = None
) -> torch.optim.Optimizer:
    """Build the optimizer with OpenCLIP's parameter groups.

    Args:
        model: the (possibly DDP-wrapped) model; parameters without ``requires_grad`` are left out.
        args: OpenCLIP's flags (``opt``, ``lr``, ``wd``, ``beta1``, ...), and ``lookahead_steps`` where given.
        logit_scale_lr: constant learning rate of ``log(1/τ)``, which then gets a group of its own, the last one; None
            leaves it in OpenCLIP's group without weight decay.
        head: modules of the loss that are trained with the model, in the same groups.

    Raises:
        UsageError: unknown optimizer, ``--beta1`` without ``--beta2``, or ``--lookahead-steps`` without LookAhead.
    """
    groups = _parameter_groups([model] if head is None else [model, head], args.wd, logit_scale_lr is not None)
    if logit_scale_lr is not None:
        groups[-1]["lr"] = logit_scale_lr
    name = args.opt.lower()
    lookahead_steps = getattr(args, "lookahead_steps", None)
    if lookahead_steps is not None and not name.startswith(LOOKAHEAD):
        raise UsageError(f"--lookahead-steps needs an optimizer with LookAhead, such as --opt {LOOKAHEAD}sgd")
    if name == "adamw":
        parameters = [parameter for group in groups for parameter in group["params"]]
        fused = (distributed.world_size() == 1 and all(map(_gains_from_fusing, parameters))) or None
        return torch.optim.AdamW(groups, lr=args.lr, betas=(args.beta1, args.beta2), eps=args.eps, fused=fused)
    if not name.startswith("timm/"):
        raise UsageError(f"unknown optimizer --opt {args.opt!r}; known: adamw, timm/NAME")
    own_groups = logit_scale_lr is not None or head is not None
    optimizer = _timm_optimizer(groups if own_groups else model, name.removeprefix("timm/"), args)
    if lookahead_steps is not None:
        for group in optimizer.param_groups:
            group["lookahead_k"] = lookahead_steps
    return optimizer


def _gains_from_fusing(parameter: nn.Parameter) -> bool:
    """Whether torch's default for it would be a loop of small operations: 49 ms a step for the demo model, 6 ms fused.

    In 16 bits both round differently. With several processes the default stays, so that a run may change from whole to
    sharded parameters (``--fsdp``), for which fusing is not tested, without another rounding.
    """
    return parameter.is_cpu and parameter.dtype in (torch.float32, torch.float64)


def _parameter_groups(modules: list[nn.Module], weight_decay: float, own_logit_scale: bool) -> list[dict]:
    """OpenCLIP's two groups (gains and biases without decay, the rest), and optionally the logit scale alone."""
    gains_and_biases, rest, logit_scale = [], [], []
    for name, parameter in itertools.chain.from_iterable(module.named_parameters() for module in modules):
        if not parameter.requires_grad:
            continue
        if own_logit_scale and name.rsplit(".", 1)[-1] == LOGIT_SCALE:
            logit_scale.append(parameter)
        elif parameter.ndim < 2 or any(part in name for part in ("bn", "ln", "bias", LOGIT_SCALE)):
            gains_and_biases.append(parameter)
        else:
            rest.append(parameter)
    groups = [{"params": gains_and_biases, "weight_decay": 0.0}, {"params": rest, "weight_decay": weight_decay}]
    if own_logit_scale:
        groups.append({"params": logit_scale, "weight_decay": 0.0})
    return groups


def _timm_optimizer(
    model_or_groups: nn.Module | list[dict], name: str, args: argparse.Namespace
) -> torch.optim.Optimizer:
    """timm's optimizer; for a model timm makes its own groups, as under OpenCLIP."""
    from timm.optim import create_optimizer_v2

    if (args.beta1 is None) != (args.beta2 is None):
        raise UsageError("a timm optimizer needs both --beta1 and --beta2, or neither")
    options = {}
    if args.beta1 is not None:
        options["betas"] = (args.beta1, args.beta2)
    if args.momentum is not None:
        options["momentum"] = args.momentum
    return create_optimizer_v2(model_or_groups, name, lr=args.lr, weight_decay=args.wd, eps=args.eps, **options)


def create_schedule(
    args: argparse.Namespace,
    optimizer: torch.optim.Optimizer,
    steps_per_epoch: int,
    logit_scale_lr: float | None,
) -> Callable[[int], None]:
    """The learning rates as a function of the optimizer step over the run.

    The encoders follow OpenCLIP's schedule (untouched under ``--skip-scheduler``); a logit scale with a rate of its own
    keeps it: no warm-up, no decay (METHODS, global learned temperature).
    """
    encoders = None if args.skip_scheduler else compat.create_scheduler(args, optimizer, steps_per_epoch)

    def set_learning_rates(step: int) -> None:
        if encoders is None:
            return
        encoders(step)
        if logit_scale_lr is not None:
            optimizer.param_groups[-1]["lr"] = logit_scale_lr

    return set_learning_rates
