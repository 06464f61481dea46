"""The loss of a run: built from its options, and checked against the rest of the run."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from openclip_ext import compat, distributed
from openclip_ext.contrastive.loss import ContrastiveLoss
from openclip_ext.heads import read_heads
from openclip_ext.losses import registry
from openclip_ext.training.errors import UsageError


@dataclass(frozen=True)
class LossConfig:
    """The loss and its options.

    Attributes:
        name: ``--loss``.
        options: for ``create_loss``.
        given: the options that the user gave, whose values beat those of a pretrained model.
        without_effect: flags that the user gave for other losses.
    """

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)
    given: frozenset[str] = frozenset()
    without_effect: tuple[str, ...] = ()

    @property
    def has_parts(self) -> bool:
        """Whether the user asked for a part by name."""
        return any(self.options.get(part) is not None for part in ("normalizer", "temperature_scheme"))


def build_loss(
    config: LossConfig, model_name: str, model: nn.Module, num_samples: int, device: torch.device
) -> ContrastiveLoss:
    """Create the loss for a model and a data set.

    Raises:
        UsageError: the model trains something that the loss would ignore.
        ValueError: options that do not fit.
    """
    if compat.is_captioner(model) and (config.name != compat.OPENCLIP_LOSSES[0] or config.has_parts):
        parts = " with another temperature scheme" if config.has_parts else ""
        raise UsageError(
            f"{model_name} trains a captioner, too, which --loss {config.name}{parts} would ignore; use --loss openclip"
        )
    if config.without_effect and distributed.is_master():
        logging.warning(f"Without effect on --loss {config.name}: {', '.join(config.without_effect)}.")
    width = compat.embedding_dim(model_name, model)
    loss = registry.create_loss(config.name, embed_dim=width, num_samples=num_samples, **config.options)
    return loss.to(device)


def load_pretrained_heads(loss: ContrastiveLoss, pretrained: str) -> None:
    """Start the modules that the loss trains with the model from the checkpoint that the model starts from.

    Raises:
        UsageError: the checkpoint's are of another kind or size.
    """
    heads: Any = read_heads(pretrained)
    own: Any = loss.model_head()
    if heads is None:
        return
    if own is None:
        logging.warning(f"{pretrained} holds heads of the kind {heads.kind!r}, which this loss leaves out.")
    elif (own.kind, own.config) != (heads.kind, heads.config):
        raise UsageError(
            f"{pretrained} holds heads {heads.kind} {heads.config}, this run's are {own.kind} {own.config}: give the same "
            "options, or start from another model"
        )
    else:
        own.load_state_dict(heads.state_dict())
