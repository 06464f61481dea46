"""Use a loss with a model in any training loop."""

import logging
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from openclip_ext import compat, distributed
from openclip_ext.contrastive.checks import without_autocast
from openclip_ext.contrastive.loss import ContrastiveLoss
from openclip_ext.contrastive.model import LOGIT_SCALE, prepare_for, symmetric_cross_entropy
from openclip_ext.data.indexed import INDEX
from openclip_ext.files.schema import checked_dict

_LOG = logging.getLogger(__name__)


def split_batch(batch: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Split a batch into the model's inputs and the loss's inputs (``index``, ``positives``, ``reference``)."""
    for_loss = {name: batch[name] for name in (INDEX, "positives", "reference") if name in batch}
    return {name: value for name, value in batch.items() if name not in for_loss}, for_loss


def _has_trained_temperature(model: Any) -> bool:
    """Return whether a model's ``logit_scale`` differs from the initial values of OpenCLIP and ``transformers``."""
    scale = model.get_parameter(LOGIT_SCALE).detach()
    configured = getattr(getattr(model, "config", None), "logit_scale_init_value", None)
    # CLIP, SigLIP in OpenCLIP, and SigLIP in transformers, whose configurations of other models have the value.
    initial = [math.log(1 / 0.07), math.log(10), 0.0] + ([] if configured is None else [configured])
    precision = max(1e-4, torch.finfo(scale.dtype).eps)  # transformers rounds log(1/0.07) to 2.6592
    if any(math.isclose(scale.item(), value, rel_tol=precision, abs_tol=1e-6) for value in initial):
        return False
    _LOG.info(
        f"The model's temperature {math.exp(-scale.item()):.4g} is not a usual initial value, so it counts as trained. A loss "
        "that trains the temperature keeps it. To set a different temperature, use create_loss(..., temperature=...)."
    )
    return True


class ModelLoss:
    """A loss of a model's outputs, which also sets the model's temperature: initial value, learning rate and bounds.

    Args:
        loss: Loss from ``openclip_ext.create_loss``.
        model: Model with the parameter ``logit_scale``, ``log(1/τ)``. The parameter is frozen if the loss does not train it.
        is_trained: Whether ``logit_scale`` (and ``logit_bias``) are trained. A trained model keeps them if the loss trains the
            temperature and was created without ``temperature=``. Otherwise, they are set to the loss's initial values, if the
            loss has any. None (default) means trained if ``logit_scale`` differs from the initial values of OpenCLIP and
            ``transformers``.
        averages: Whether DistributedDataParallel averages the gradient of ``logit_scale``. If not, this class averages it.

    Raises:
        ValueError: The loss trains its own modules, compares two views of an image, or would ignore the model's captioner; the
            model has no ``logit_scale``.

    Example:
        >>> model_loss = ModelLoss(openclip_ext.create_loss("neuclip", embed_dim=512), model)
        >>> optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4)
        >>> model_loss.separate_rate(optimizer)
        >>> model_loss(model(image, text)).backward()
        >>> model_loss.step(optimizer)
    """

    def __init__(
        self, loss: ContrastiveLoss, model: nn.Module, averages: bool = True, is_trained: bool | None = None
    ) -> None:
        if loss.model_head() is not None or loss.views > 1:
            raise ValueError(
                f"{type(loss).__name__} trains its own modules or compares two views of an image, which this class does not "
                "support. Train with: python -m openclip_ext.training.main"
            )
        if not hasattr(model, LOGIT_SCALE):
            raise ValueError(
                f"{type(model).__name__} has no parameter logit_scale: pass the two-tower model itself, before "
                "DistributedDataParallel wraps it"
            )
        if compat.is_captioner(model) and not loss.trains_captions:
            raise ValueError(
                f"{type(loss).__name__} would not train the captions of {type(model).__name__}: use create_loss('openclip')"
            )
        prepare_for(loss, model, _has_trained_temperature(model) if is_trained is None else is_trained)
        self.loss = loss
        self.logit_scale = model.get_parameter(LOGIT_SCALE)
        self._logit_bias = getattr(model, "logit_bias", None)
        self._averages = averages
        self._before: Tensor | None = None

    def __call__(
        self,
        outputs: Mapping[str, Any],
        index: Tensor | None = None,
        training: bool = True,
        positives: Tensor | None = None,
        reference: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        """Return the loss of a batch, 0-d.

        Args:
            outputs: Outputs of OpenCLIP's models (``output_dict=True``), or of CLIP, SigLIP or dual encoders in
                ``transformers``.
            index: Positions ``(B_local,)`` of the samples in the training set, if the loss needs them.
            training: Whether this is training data. If not, return OpenCLIP's loss over this process's samples, and do not
                change the loss's state.
            positives: Labels or mask of equal captions, for a loss with ``equal_captions`` (see the loss's ``forward``).
            reference: A reference model's embeddings, for a loss with ``reference_dim`` (see the loss's ``forward``).
        """
        features = self._features(outputs)
        if not training:
            with without_autocast(features["image_features"]):
                similarities = features["image_features"].float() @ features["text_features"].float().T
                return symmetric_cross_entropy(features["logit_scale"] * similarities)
        return self.loss(**features, index=index, positives=positives, reference=reference)

    def _features(self, outputs: Mapping[str, Any]) -> dict[str, Any]:
        names = list(outputs) if isinstance(outputs, Mapping) else []
        if "image_features" in names:
            return dict(outputs)
        if "image_embeds" not in names:
            raise ValueError(
                f"the model returned {', '.join(names) or type(outputs).__name__}: expected image_features and text_features "
                "(OpenCLIP with output_dict=True), or image_embeds and text_embeds (transformers)"
            )
        return {
            "image_features": outputs["image_embeds"],
            "text_features": outputs["text_embeds"],
            "logit_scale": self.logit_scale.exp(),
            "logit_bias": self._logit_bias,
        }

    def separate_rate(self, optimizer: Optimizer) -> None:
        """Move the temperature to its own parameter group, if the loss sets the temperature's learning rate.

        Call this method before you create a learning rate schedule.
        """
        rate = self.loss.logit_scale_lr
        if rate is None:
            return
        for group in optimizer.param_groups:
            group["params"] = [parameter for parameter in group["params"] if parameter is not self.logit_scale]
        optimizer.add_param_group({"params": [self.logit_scale], "lr": rate, "weight_decay": 0.0})

    def before_step(self, optimizer: Optimizer) -> None:
        """Set the temperature's learning rate, without a schedule or weight decay. Call this before ``optimizer.step()``.

        Raises:
            ValueError: The temperature has no parameter group of its own.
        """
        self._before = self.logit_scale.detach().clone()
        if not self._averages and self.logit_scale.grad is not None:
            self.logit_scale.grad = distributed.all_reduce_sum(self.logit_scale.grad) / distributed.world_size()
        if self.loss.logit_scale_lr is None:
            return
        groups = [g for g in optimizer.param_groups if any(p is self.logit_scale for p in g["params"])]
        if len(groups) != 1 or len(groups[0]["params"]) > 1:
            raise ValueError(
                "the loss sets the temperature's learning rate, but logit_scale has no parameter group of its own: call "
                "separate_rate(optimizer) once, before you create a schedule"
            )
        groups[0] |= {"lr": self.loss.logit_scale_lr, "weight_decay": 0.0}

    def after_step(self) -> None:
        """Clamp the temperature to the loss's bounds. Call this method after ``optimizer.step()``."""
        self.loss.finish_logit_scale_step(self.logit_scale, self._before)

    def step(self, optimizer: Optimizer) -> None:
        """Call :meth:`before_step`, ``optimizer.step()`` and :meth:`after_step`."""
        self.before_step(optimizer)
        optimizer.step()
        self.after_step()

    def check_loop(self, accumulation: int, repeats: bool) -> None:
        """Raise ValueError if the loop would corrupt the loss's state, or if the processes are not connected.

        Args:
            accumulation: Number of micro-batches per optimizer step.
            repeats: Whether the last batch of an epoch is filled with samples of earlier batches.
        """
        if accumulation > 1 and self.loss.keeps_state:
            raise ValueError(
                f"each of {accumulation} accumulated batches would update the loss's state: do not accumulate. Use batches "
                f"{accumulation} times as large, with integrations.micro_batches.in_micro_batches(model, size) to save memory"
            )
        if repeats and self.loss.needs_index:
            raise ValueError(
                "the last batch of an epoch repeats earlier samples: set drop_last=True in the DataLoader (accelerate) or "
                "DistributedSampler (Lightning), or dataloader_drop_last=True (Hugging Face)"
            )
        if processes := distributed.unconnected_processes():
            raise ValueError(
                f"the trainer did not connect {processes} processes: each would train alone. On a CPU, set use_cpu=True in "
                f"TrainingArguments (Hugging Face) or cpu=True in Accelerator; in lightning.Trainer, set devices={processes}"
            )

    def state_dict(self) -> dict[str, Any]:
        """Return the loss's state, all shards of its tables, and the temperature. Collective: all ranks call it."""
        tables = {name: table.rows(0, table.size) for name, table in self.loss.tables().items()}
        parts = distributed.all_gather_object(tables)
        return {
            "loss": {name: value.cpu() for name, value in self.loss.replicated_state().items()},
            "tables": {name: [part[name] for part in parts] for name in tables},
            LOGIT_SCALE: self.logit_scale.detach().cpu().clone(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a :meth:`state_dict` from any number of processes; raise ValueError for different options or data."""
        state = checked_dict(state, "the saved loss")
        saved = checked_dict(state.get("tables"), "tables of the saved loss", list)
        tables = {name: [part.numpy() for part in parts] for name, parts in saved.items()}
        self.loss.restore_state(state["loss"], tables, "the saved loss")
        with torch.no_grad():
            self.logit_scale.copy_(state[LOGIT_SCALE])
        self.loss.include_in_bounds(self.logit_scale.item())
