"""The optimizer, as in OpenCLIP, with optional separate learning rates for the temperature, towers and layers."""

import ast
import fnmatch
import itertools
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from openclip_ext import compat, distributed
from openclip_ext.cli.errors import UsageError
from openclip_ext.cli.messages import get_logger
from openclip_ext.contrastive.model import LOGIT_SCALE
from openclip_ext.training import parallel
from openclip_ext.training.config import OptimizerConfig, ScheduleConfig

logger = get_logger(__name__)

# Key in a parameter group for its learning rate divided by the schedule's. In timm, the name "lr_scale" is already taken.
SCALE = "rate_of_schedule"
# Keys in a parameter group whose values come from flags. Other keys may be state of the optimizer.
HYPERPARAMETERS = ("lr", "weight_decay", "betas", "eps", "momentum", "lookahead_k", SCALE)
# Optimizer arguments that --opt-kwargs does not accept: those in the first line have flags, the program sets the others.
_RESERVED = (
    *("lr", "weight_decay", "betas", "eps", "momentum"),
    *("params", "fused", "foreach", "capturable", "differentiable"),
)
_LAYER = re.compile(r"(?:^|\.)(?:resblocks|blocks|layers?|stages?)\.?(\d+)\.")
_AFTER = re.compile(r"attn_?pool|(?:^|\.)head")
_BEFORE = re.compile(r"embed|token|stem|patch|cls_|ln_pre|norm_pre|(?:^|\.)(?:conv|bn)\d")
_OF_NEITHER = ("logit_scale", "logit_bias")


def create_optimizer(
    model: nn.Module, config: OptimizerConfig, logit_scale_lr: float | None, head: nn.Module | None = None
) -> torch.optim.Optimizer:
    """Build the optimizer with OpenCLIP's parameter groups.

    If ``logit_scale_lr`` is a number, ``log(1/τ)`` has this constant learning rate, in a separate last group. If it is None,
    ``log(1/τ)`` is in OpenCLIP's group without weight decay. ``head`` contains the loss's projection heads, whose parameters
    are added to the model's groups.
    """
    modules = [model] if head is None else [model, head]
    name = full_name(config)
    # As in timm, the unwrapped model's ``no_weight_decay`` lists the parameters without weight decay.
    listed: set[str] | None = None if name == "adamw" else getattr(parallel.unwrap(model), "no_weight_decay", set)()
    groups = _parameter_groups(modules, config.weight_decay, logit_scale_lr is not None, config.decay_excluded, listed)
    if not any(group["params"] for group in groups):
        raise UsageError(
            "nothing is left to train: both towers are locked, and the loss does not train the temperature. Unlock a tower"
        )
    towers = config.tower_rates()
    if towers:
        groups = _split_by_rate(groups, config.lr, lr_scales(model, towers), model)
    if logit_scale_lr is not None:
        groups[-1]["lr"] = logit_scale_lr
    is_muon = "muon" in name
    if is_muon:
        groups = _with_fallback(groups, modules)
    # If no special groups are necessary, timm receives the model and builds the groups, as in OpenCLIP.
    own_groups = is_muon or logit_scale_lr is not None or head is not None or bool(towers or config.decay_excluded)
    more = further_arguments(config)
    try:
        if name == "adamw":
            return _adamw(groups, config, more)
        return _timm_optimizer(name, groups if own_groups else parallel.unwrap(model), config, more)
    except (TypeError, ValueError, RuntimeError, AssertionError) as error:
        given = " ".join([config.name, *(["--opt-kwargs"] if more else []), *config.kwargs])
        raise UsageError(f"--opt {given}: {error}") from error


def check_optimizer(config: OptimizerConfig) -> None:
    """Raise UsageError if the optimizer does not exist or rejects its settings. A run calls this before it reads the data."""
    plain = replace(config, decay_excluded=(), lr_image=None, lr_text=None, image_layer_decay=1.0, text_layer_decay=1.0)
    create_optimizer(nn.Linear(2, 2), plain, None)


def full_name(config: OptimizerConfig) -> str:
    """Return the optimizer's normalized name: ``adamw`` or ``timm/NAME``."""
    name = config.name.lower()
    return "timm/lamb" if name == "lamb" else name


def further_arguments(config: OptimizerConfig) -> dict[str, Any]:
    """Return the arguments of ``--opt-kwargs`` as Python values. Reject arguments that flags or the program set."""
    found = {}
    for word in config.kwargs:
        name, separator, text = word.partition("=")
        if not separator or not name.isidentifier():
            raise UsageError(f"--opt-kwargs {word}: expected NAME=VALUE, such as amsgrad=True")
        if name in _RESERVED:
            raise UsageError(f"--opt-kwargs {word}: another flag or the program sets {name}. Remove the word")
        try:
            found[name] = ast.literal_eval(text)
        except (ValueError, SyntaxError):
            found[name] = text
    return found


def _adamw(groups: list[dict[str, Any]], config: OptimizerConfig, more: dict[str, Any]) -> torch.optim.AdamW:
    parameters = [parameter for group in groups for parameter in group["params"]]
    # On a GPU, only a fused optimizer can skip a step without a sync (see ``guard.py``).
    on_gpu = all(parameter.is_cuda for parameter in parameters)
    # On a CPU, the fused optimizer is faster: 6 ms instead of 49 ms per step for the demo model. With 16-bit parameters it
    # is not used, because it rounds differently from the default optimizer. With several processes it is not used either,
    # because DDP and ``--fsdp`` would then give different results.
    full_precision = (torch.float32, torch.float64)
    on_cpu = all(parameter.is_cpu and parameter.dtype in full_precision for parameter in parameters)
    fused = on_gpu or (on_cpu and distributed.world_size() == 1) or None
    betas: Any = (config.beta1, config.beta2)
    eps: Any = config.eps
    return torch.optim.AdamW(groups, lr=config.lr, betas=betas, eps=eps, fused=fused, **more)


def _timm_optimizer(name: str, parameters: Any, config: OptimizerConfig, more: dict[str, Any]) -> torch.optim.Optimizer:
    from timm.optim import create_optimizer_v2

    betas = None if config.beta1 is None else (config.beta1, config.beta2)
    options: dict[str, Any] = {"eps": config.eps, "betas": betas, "momentum": config.momentum}
    options = {option: value for option, value in options.items() if value is not None}
    options |= {"lr": config.lr, "weight_decay": config.weight_decay, **more}
    optimizer = create_optimizer_v2(parameters, name.removeprefix("timm/"), **options)
    if config.lookahead_steps is not None:
        for group in optimizer.param_groups:
            group["lookahead_k"] = config.lookahead_steps
    return optimizer


def _parameter_groups(
    modules: list[nn.Module],
    weight_decay: float,
    own_logit_scale: bool,
    excluded: Sequence[str],
    listed: Collection[str] | None,
) -> list[dict[str, Any]]:
    """Return two groups: parameters without weight decay (such as gains and biases), and parameters with weight decay.

    With ``own_logit_scale``, the logit scale is a third group. No weight decay applies to scalars and vectors, to names that
    match a pattern in ``excluded``, and to names that a rule excludes: OpenCLIP's rule for AdamW if ``listed`` is None, else
    timm's rule with the model's list ``listed``. Raise UsageError if a pattern matches no trained parameter.
    """
    unused = set(excluded)
    gains_and_biases, rest, logit_scale = [], [], []
    for name, parameter in itertools.chain.from_iterable(module.named_parameters() for module in modules):
        if not parameter.requires_grad:
            continue
        if own_logit_scale and name.rsplit(".", 1)[-1] == LOGIT_SCALE:
            logit_scale.append(parameter)
            continue
        plain = name.removeprefix("module.")  # the prefix of DistributedDataParallel
        matching = {glob for glob in excluded if fnmatch.fnmatchcase(plain, glob)}
        unused -= matching
        if listed is None:
            is_named = any(part in name for part in ("bn", "ln", "bias", LOGIT_SCALE))
        else:
            is_named = name.endswith(".bias") or any(fnmatch.fnmatchcase(plain, glob) for glob in listed)
        if matching or parameter.ndim < 2 or is_named:
            gains_and_biases.append(parameter)
        else:
            rest.append(parameter)
    if unused:
        raise UsageError(
            f"--wd-exclude {sorted(unused)[0]}: matches no trained parameter. Quote the pattern, and check the names"
        )
    groups = [{"params": gains_and_biases, "weight_decay": 0.0}, {"params": rest, "weight_decay": weight_decay}]
    if own_logit_scale:
        groups.append({"params": logit_scale, "weight_decay": 0.0})
    return groups


def _split_by_rate(
    groups: list[dict[str, Any]], lr: float, by_name: dict[str, float], model: nn.Module
) -> list[dict[str, Any]]:
    """Split each group by learning rate, in order. Each new group stores its ratio to ``lr`` under :data:`SCALE`."""
    scale_of = {id(parameter): by_name.get(name, 1.0) for name, parameter in model.named_parameters()}
    split: list[dict[str, Any]] = []
    for group in groups:
        by_scale: dict[float, list[nn.Parameter]] = {}
        for parameter in group["params"]:
            by_scale.setdefault(scale_of.get(id(parameter), 1.0), []).append(parameter)
        split += [{**group, "params": found, "lr": lr * scale, SCALE: scale} for scale, found in by_scale.items()]
    return split


def _with_fallback(groups: Sequence[dict[str, Any]], modules: Sequence[nn.Module]) -> list[dict[str, Any]]:
    """Split the groups for Muon: parameters outside of layers, such as embeddings and projections, get its fallback, AdamW.

    timm chooses by shape only, so it would also give embeddings to Muon.
    """
    named = (parameter for module in modules for parameter in module.named_parameters())
    in_layers = {id(parameter) for name, parameter in named if _LAYER.search(name)}
    split = []
    for group in groups:
        for is_fallback in (False, True):
            found = [parameter for parameter in group["params"] if (id(parameter) not in in_layers) == is_fallback]
            if found:
                split.append({**group, "params": found, "use_fallback": is_fallback})
    return split


def lr_scales(model: nn.Module, towers: Mapping[str, tuple[float, float]]) -> dict[str, float]:
    """Return each trained parameter's learning rate divided by the schedule's, by name in the (wrapped) model.

    In a tower with ``L`` layers and layer decay ``δ``, this ratio is ``δ^(L+1)`` for embeddings (or stem), ``δ^(L+1−l)`` for
    layer ``l``, and 1 for the projection and its norm, each multiplied by the tower's factor. ``towers`` is the result of
    ``OptimizerConfig.tower_rates``.
    """
    names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    is_image = {name: name.removeprefix("module.").startswith("visual.") for name in names}
    parameters = {
        "image": [name for name in names if is_image[name]],
        "text": [name for name in names if not is_image[name] and not name.endswith(_OF_NEITHER)],
    }
    scales = dict.fromkeys(names, 1.0)
    for tower, (factor, decay) in towers.items():
        own = parameters[tower]
        if not own:
            raise UsageError(
                f"--lr-{tower} and --{tower}-layer-decay have no effect on a tower that is not trained: remove them"
            )
        depth = dict.fromkeys(own, 0) if decay == 1 else depths(tower, own)
        scales |= {name: factor * decay ** depth[name] for name in own}
    return scales


def depths(tower: str, names: list[str]) -> dict[str, int]:
    """Return each parameter's distance in layers from the end of the tower, where the distance is 0."""
    found = {name: _LAYER.search(name) for name in names}
    numbers = sorted({int(match[1]) for match in found.values() if match})
    if not numbers:
        raise UsageError(f"--{tower}-layer-decay: no layers in this tower ({', '.join(names[:3])}, ...). Remove it")
    depth = {number: len(numbers) - place for place, number in enumerate(numbers)}
    outside = {name: 0 if _AFTER.search(name) or not _BEFORE.search(name) else len(numbers) + 1 for name in names}
    return {name: outside[name] if match is None else depth[int(match[1])] for name, match in found.items()}


def schedule_rate(optimizer: torch.optim.Optimizer) -> float:
    """Return the schedule's current learning rate. Towers may use multiples of this learning rate."""
    group = optimizer.param_groups[0]
    return group["lr"] / group.get(SCALE, 1.0)


def create_schedule(
    config: ScheduleConfig,
    optimizer: torch.optim.Optimizer,
    steps_per_epoch: int,
    logit_scale_lr: float | None,
) -> Callable[[int], None]:
    """Return a function that sets the learning rates for a given optimizer step of the run.

    The encoders follow OpenCLIP's schedule. ``logit_scale_lr`` is constant, without warm-up or decay (see
    docs/methods/fastclip.md).
    """
    steps = steps_per_epoch * config.epochs
    warmup = config.warmup_steps(steps)
    if warmup >= steps and not config.skip and distributed.is_rank0():
        logger.warning(f"Lower --warmup {warmup:,}: a run of {steps:,} steps does not reach --lr {config.lr:g}.")
    cooldown = None if config.cooldown_epochs is None else steps_per_epoch * config.cooldown_epochs
    encoders = compat.create_scheduler(
        config.name,
        optimizer,
        lr=config.lr,
        warmup=warmup,
        steps=steps,
        cooldown=(cooldown, config.cooldown_power, config.cooldown_end),
    )

    def set_learning_rates(step: int) -> None:
        if config.skip:
            return
        rate = encoders(min(step, steps - 1))
        if config.lr_min and step >= warmup:
            rate += config.lr_min * (1 - rate / config.lr)
        for group in optimizer.param_groups:
            group["lr"] = rate * group.get(SCALE, 1.0)
        if logit_scale_lr is not None:
            optimizer.param_groups[-1]["lr"] = logit_scale_lr

    return set_learning_rates
