"""Prepare a model for a loss: the model's temperature, frozen parameters, and batch normalization."""

import contextlib
import warnings
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from openclip_ext import compat, distributed
from openclip_ext.cli.messages import get_logger
from openclip_ext.contrastive.loss import ContrastiveLoss

logger = get_logger(__name__)
# Name of the model's parameter ``log(1/τ)``.
LOGIT_SCALE = "logit_scale"
# Names of the model's outputs that are single numbers. The other outputs have one row per sample.
SCALARS = (LOGIT_SCALE, "logit_bias")


def prepare_for(loss: ContrastiveLoss, model: nn.Module, is_trained: bool = False) -> None:
    """Set the initial temperature and bias of a model, and freeze parameters that the loss does not train.

    A trained model (``is_trained``) keeps its temperature and bias if the loss trains the temperature, and the user did not
    give an initial temperature. The loss's bounds of the temperature are then widened to include the model's temperature.

    Parameters are frozen because DistributedDataParallel fails if a trainable parameter has no gradient.

    Raises:
        ValueError: The loss trains a bias, but the model has no bias.

    Warns:
        UserWarning: The loss has trainable parameters that no optimizer updates.

    Also log a warning if the model has a bias that the loss does not train.
    """
    head = loss.model_head()
    in_optimizer = set() if head is None else {*head.parameters()}
    untrained = [name for name, value in loss.named_parameters() if value.requires_grad and value not in in_optimizer]
    if untrained:
        warnings.warn(
            f"{type(loss).__name__}: no optimizer updates {', '.join(untrained)}. Return their module in model_head(), or set "
            "requires_grad=False",
            stacklevel=2,
        )
    logit_scale = model.get_parameter(LOGIT_SCALE)
    logit_bias = getattr(model, "logit_bias", None)
    if logit_bias is not None and loss.initial_logit_bias is None and loss.views == 1 and distributed.is_rank0():
        logger.warning(
            "The model has a logit_bias, like the models of SigLIP, and this loss ignores it: use the loss siglip "
            "(--loss siglip) to train the model as before."
        )
    keeps_own = is_trained and loss.learns_logit_scale and "temperature" not in loss.given
    if loss.initial_logit_bias is not None:
        if logit_bias is None:
            raise ValueError(
                f"{type(loss).__name__} trains a bias: expected a model with the parameter logit_bias, such as OpenCLIP's "
                f"with init_logit_bias={loss.initial_logit_bias:g}"
            )
        # OpenCLIP loads weights without a bias with a bias of 0, which destroys the model in the first steps.
        lacks_bias = keeps_own and logit_bias.item() == 0
        if lacks_bias and distributed.is_rank0():
            logger.info(
                f"The pretrained weights have no logit_bias: it begins at {loss.initial_logit_bias:g}, as in a new model."
            )
        if lacks_bias or not keeps_own:
            with torch.no_grad():
                logit_bias.fill_(loss.initial_logit_bias)
    if keeps_own:
        loss.include_in_bounds(logit_scale.item())
    elif loss.initial_logit_scale is not None:
        with torch.no_grad():
            logit_scale.fill_(loss.initial_logit_scale)
    if not loss.learns_logit_scale:
        logit_scale.requires_grad_(False)
    if logit_bias is not None and not loss.uses_logit_bias:
        logit_bias.requires_grad_(False)
    if loss.trains_captions_only and compat.is_captioner(model):
        for parameter in compat.unused_by_captions(model):
            parameter.requires_grad_(False)
    if loss.views > 1:  # such a loss uses only images, so only the visual tower is trained
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(parameter.requires_grad and name.startswith("visual."))


def set_training_mode(model: nn.Module) -> None:
    """Set a model to training mode, except for modules whose parameters are all frozen: these stay in evaluation mode.

    So the BatchNorm statistics of frozen layers do not change, and their dropout does not act.
    """
    model.train()
    for module in frozen_modules(model):
        module.eval()


def frozen_modules(model: nn.Module) -> list[nn.Module]:
    """Return the modules of a model that have parameters, but no trained parameters."""
    trains = {module: [parameter.requires_grad for parameter in module.parameters()] for module in model.modules()}
    return [module for module, flags in trains.items() if flags and not any(flags)]


@contextlib.contextmanager
def frozen_batchnorm_statistics(model: nn.Module) -> Iterator[None]:
    """Do not update BatchNorm's running statistics inside the ``with`` block.

    Use it for one of two forward passes of a batch, because a batch must update the statistics only once.
    """
    layers: list[Any] = compat.batch_norms(model)
    counts = [None if layer.num_batches_tracked is None else layer.num_batches_tracked.clone() for layer in layers]
    momenta = [layer.momentum for layer in layers]
    for layer in layers:
        layer.momentum = 0.0
    try:
        yield
    finally:
        for layer, momentum, count in zip(layers, momenta, counts, strict=True):
            layer.momentum = momentum
            if count is not None and layer.num_batches_tracked is not None:
                layer.num_batches_tracked.copy_(count)


def symmetric_cross_entropy(logits: Tensor) -> Tensor:
    """Return OpenCLIP's contrastive loss of a square matrix of logits."""
    labels = torch.arange(len(logits), device=logits.device)
    return (F.cross_entropy(logits, labels) + F.cross_entropy(logits.T, labels)) / 2
