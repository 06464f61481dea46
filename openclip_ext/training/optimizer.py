"""The optimizer and its learning rates: OpenCLIP's, with a rate of its own for the temperature where the loss asks."""

import argparse
from collections.abc import Callable

import torch
from torch import nn

from openclip_ext import compat
from openclip_ext.training.errors import UsageError

LOGIT_SCALE = "logit_scale"


def create_optimizer(model: nn.Module, args: argparse.Namespace, logit_scale_lr: float | None) -> torch.optim.Optimizer:
    """Build the optimizer with OpenCLIP's parameter groups.

    Args:
        model: the (possibly DDP-wrapped) model; parameters without ``requires_grad`` are left out.
        args: OpenCLIP's flags (``opt``, ``lr``, ``wd``, ``beta1``, ...).
        logit_scale_lr: constant learning rate of ``log(1/τ)``, which then gets a group of its own, the last one; None
            leaves it in OpenCLIP's group without weight decay.

    Raises:
        UsageError: unknown optimizer, or ``--beta1`` without ``--beta2``.
    """
    groups = _parameter_groups(model, args.wd, own_logit_scale=logit_scale_lr is not None)
    if logit_scale_lr is not None:
        groups[-1]["lr"] = logit_scale_lr
    name = args.opt.lower()
    if name == "adamw":
        return torch.optim.AdamW(groups, lr=args.lr, betas=(args.beta1, args.beta2), eps=args.eps)
    if not name.startswith("timm/"):
        raise UsageError(f"unknown optimizer --opt {args.opt!r}; known: adamw, timm/NAME")
    return _timm_optimizer(model, groups, name.removeprefix("timm/"), args, own_groups=logit_scale_lr is not None)


def _parameter_groups(model: nn.Module, weight_decay: float, own_logit_scale: bool) -> list[dict]:
    """OpenCLIP's two groups (gains and biases without decay, the rest), and optionally the logit scale alone."""
    gains_and_biases, rest, logit_scale = [], [], []
    for name, parameter in model.named_parameters():
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
    model: nn.Module, groups: list[dict], name: str, args: argparse.Namespace, own_groups: bool
) -> torch.optim.Optimizer:
    from timm.optim import create_optimizer_v2

    if (args.beta1 is None) != (args.beta2 is None):
        raise UsageError("a timm optimizer needs both --beta1 and --beta2, or neither")
    options = {}
    if args.beta1 is not None:
        options["betas"] = (args.beta1, args.beta2)
    if args.momentum is not None:
        options["momentum"] = args.momentum
    parameters = groups if own_groups else model  # for a model timm makes its own groups, as under OpenCLIP
    return create_optimizer_v2(parameters, name, lr=args.lr, weight_decay=args.wd, eps=args.eps, **options)


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
