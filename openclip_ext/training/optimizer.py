"""The optimizer and its learning rates: OpenCLIP's, with a rate of its own for the temperature where the loss asks."""

import itertools
import logging
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from openclip_ext import compat, distributed
from openclip_ext.cli.errors import UsageError
from openclip_ext.cli.options import nearest
from openclip_ext.contrastive.model import LOGIT_SCALE
from openclip_ext.training.config import OptimizerConfig, ScheduleConfig
from openclip_ext.training.lr_scales import lr_scales

# Of a parameter group: its learning rate over the schedule's. Timm's optimizers have another use for "lr_scale".
SCALE = "rate_of_schedule"
# Of a parameter group: what flags say. Other entries may be the optimizer's state.
HYPERPARAMETERS = ("lr", "weight_decay", "betas", "eps", "momentum", "lookahead_k", SCALE)
_LOOKAHEAD = "lookahead_"
LOOKAHEAD = f"timm/{_LOOKAHEAD}"


def create_optimizer(
    model: nn.Module, config: OptimizerConfig, logit_scale_lr: float | None, head: nn.Module | None = None
) -> torch.optim.Optimizer:
    """Build the optimizer with OpenCLIP's parameter groups.

    Args:
        model: the (possibly DDP-wrapped) model; parameters without ``requires_grad`` are left out.
        logit_scale_lr: constant learning rate of ``log(1/τ)``, which then gets a group of its own, the last one; None
            leaves it in OpenCLIP's group without weight decay.
        head: modules of the loss that are trained with the model, in the same groups.
    """
    groups = _parameter_groups(
        [model] if head is None else [model, head], config.weight_decay, logit_scale_lr is not None
    )
    if not any(group["params"] for group in groups):
        raise UsageError("nothing is left to train: both towers are locked, and the loss learns no temperature")
    towers = config.tower_rates()
    if towers:
        groups = _split_by_rate(groups, config.lr, lr_scales(model, towers), model)
    if logit_scale_lr is not None:
        groups[-1]["lr"] = logit_scale_lr
    name = full_name(config)
    if name == "adamw":
        return _adamw(groups, config)
    own_groups = logit_scale_lr is not None or head is not None or bool(towers)
    optimizer = _timm_optimizer(groups if own_groups else model, name.removeprefix("timm/"), config)
    if config.lookahead_steps is not None:
        for group in optimizer.param_groups:
            group["lookahead_k"] = config.lookahead_steps
    return optimizer


def full_name(config: OptimizerConfig) -> str:
    """Return the optimizer's name, however it was spelled: ``adamw`` or ``timm/NAME``."""
    name = config.name.lower()
    return "timm/lamb" if name == "lamb" else name


def check_optimizer(config: OptimizerConfig) -> None:
    """Raise UsageError for an optimizer that does not exist, or settings that it does not take."""
    name = full_name(config)
    if config.lookahead_steps is not None and not name.startswith(LOOKAHEAD):
        raise UsageError(f"--lookahead-steps needs an optimizer with LookAhead, such as --opt {LOOKAHEAD}sgd")
    if name == "adamw":
        if config.beta1 is None or config.beta2 is None or config.eps is None:
            raise UsageError("--opt adamw needs --beta1, --beta2 and --eps")
        return
    from timm.optim import list_optimizers

    known = list_optimizers()
    plain = name.removeprefix("timm/").removeprefix(_LOOKAHEAD)
    if not name.startswith("timm/") or plain not in known:
        hint = nearest(f"timm/{plain}", [f"timm/{other}" for other in known])
        raise UsageError(f"unknown optimizer --opt {config.name!r}; known: adamw, lamb, timm/NAME{hint}")
    if (config.beta1 is None) != (config.beta2 is None):
        raise UsageError("a timm optimizer needs both --beta1 and --beta2, or neither")


def _adamw(groups: list[dict[str, Any]], config: OptimizerConfig) -> torch.optim.AdamW:
    assert config.beta1 is not None and config.beta2 is not None and config.eps is not None, "checked before"
    parameters = [parameter for group in groups for parameter in group["params"]]
    on_gpu = all(parameter.is_cuda for parameter in parameters)
    on_cpu = distributed.world_size() == 1 and all(map(_gains_from_fusing, parameters))
    # On a GPU only the fused one can skip a step without a wait (``guard.py``).
    fused = on_gpu or on_cpu or None
    betas = (config.beta1, config.beta2)
    return torch.optim.AdamW(groups, lr=config.lr, betas=betas, eps=config.eps, fused=fused)


def _gains_from_fusing(parameter: nn.Parameter) -> bool:
    """Return whether torch's default for it is a loop of small operations: 49 ms a step for the demo model, 6 ms fused.

    In 16 bits both round differently. With several processes the default stays, so that a run may change from whole to
    sharded parameters (``--fsdp``), for which fusing is not tested, without another rounding.
    """
    return parameter.is_cpu and parameter.dtype in (torch.float32, torch.float64)


def _parameter_groups(modules: list[nn.Module], weight_decay: float, own_logit_scale: bool) -> list[dict[str, Any]]:
    """Return OpenCLIP's two groups (gains and biases without decay, the rest), and optionally the logit scale alone."""
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


def _split_by_rate(
    groups: list[dict[str, Any]], lr: float, by_name: dict[str, float], model: nn.Module
) -> list[dict[str, Any]]:
    """Divide the groups, in order, into those of equal learning rates, with :data:`SCALE`."""
    scale_of = {id(parameter): by_name.get(name, 1.0) for name, parameter in model.named_parameters()}
    divided: list[dict[str, Any]] = []
    for group in groups:
        by_scale: dict[float, list[nn.Parameter]] = {}
        for parameter in group["params"]:
            by_scale.setdefault(scale_of.get(id(parameter), 1.0), []).append(parameter)
        divided += [
            {**group, "params": parameters, "lr": lr * scale, SCALE: scale} for scale, parameters in by_scale.items()
        ]
    return divided


def _timm_optimizer(
    model_or_groups: nn.Module | list[dict[str, Any]], name: str, config: OptimizerConfig
) -> torch.optim.Optimizer:
    """Build timm's optimizer; for a model timm makes its own groups, as under OpenCLIP."""
    from timm.optim import create_optimizer_v2

    options: dict[str, Any] = {"lr": config.lr, "weight_decay": config.weight_decay}
    if config.eps is not None:
        options["eps"] = config.eps
    if config.beta1 is not None:
        options["betas"] = (config.beta1, config.beta2)
    if config.momentum is not None:
        options["momentum"] = config.momentum
    return create_optimizer_v2(model_or_groups, name, **options)


# The way of log τ in a run: from OpenCLIP's start value to where the papers' runs end.
_WAY_OF_LOG_TAU = math.log(0.07 / 0.03)
_LARGEST_LOGIT_SCALE_LR = 5e-4
# In fewer steps there is nothing to learn.
_FEWEST_STEPS = 100


def logit_scale_lr(default: float | None, total_steps: int) -> float | None:
    """Return the learning rate of ``log(1/τ)`` where none was given: the loss's, or more in a short run, so that τ arrives.

    Adam moves a parameter by at most about its learning rate a step. The papers' rates are for some 10⁵ steps. None stands
    for the encoders' rate.
    """
    if default is None or total_steps < _FEWEST_STEPS:
        return default
    return max(default, min(_WAY_OF_LOG_TAU / total_steps, _LARGEST_LOGIT_SCALE_LR))


def schedule_rate(optimizer: torch.optim.Optimizer) -> float:
    """Return the schedule's learning rate, of which a tower's may be a fraction."""
    group = optimizer.param_groups[0]
    return group["lr"] / group.get(SCALE, 1.0)


def create_schedule(
    config: ScheduleConfig,
    optimizer: torch.optim.Optimizer,
    steps_per_epoch: int,
    logit_scale_lr: float | None,
) -> Callable[[int], None]:
    """Return a function of the optimizer step over the run that sets the learning rates.

    The encoders follow OpenCLIP's schedule; a logit scale with a rate of its own keeps it: no warm-up, no decay
    (docs/methods/fastclip.md).
    """
    steps = steps_per_epoch * config.epochs
    if config.warmup >= steps and not config.skip and distributed.is_master():
        logging.warning(
            f"--warmup {config.warmup:,} is as long as the run, {steps:,} steps: the learning rate does not arrive at --lr "
            f"{config.lr:g}."
        )
    cooldown = None if config.cooldown_epochs is None else steps_per_epoch * config.cooldown_epochs
    encoders = compat.create_scheduler(
        config.name,
        optimizer,
        lr=config.lr,
        warmup=config.warmup,
        steps=steps,
        cooldown_steps=cooldown,
        cooldown_power=config.cooldown_power,
        cooldown_end=config.cooldown_end,
    )

    def set_learning_rates(step: int) -> None:
        if config.skip:
            return
        rate = encoders(step)
        if config.lr_min and step >= config.warmup:
            rate += config.lr_min * (1 - rate / config.lr)
        for group in optimizer.param_groups:
            group["lr"] = rate * group.get(SCALE, 1.0)
        if logit_scale_lr is not None:
            optimizer.param_groups[-1]["lr"] = logit_scale_lr

    return set_learning_rates
