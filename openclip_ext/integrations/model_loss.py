"""A loss and the model that it trains: what every training loop has to do for them."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from openclip_ext import distributed
from openclip_ext.contrastive.loss import ContrastiveLoss
from openclip_ext.contrastive.model import LOGIT_SCALE, prepare_for, symmetric_cross_entropy
from openclip_ext.data.indexed import INDEX
from openclip_ext.files.schema import read_as


def split_batch(batch: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Split a batch into the model's part and the loss's: ``index``, and where it has them ``positives`` and ``reference``."""
    for_loss = {name: batch[name] for name in (INDEX, "positives", "reference") if name in batch}
    return {name: value for name, value in batch.items() if name not in for_loss}, for_loss


class ModelLoss:
    """Gives a loss the outputs of a model, and the model's temperature the start, rate and bounds that the loss asks for.

    Args:
        loss: From ``openclip_ext.create_loss``.
        model: Has the parameter ``logit_scale``, ``log(1/τ)``. Set to the loss's start value, or frozen if it learns no
            temperature.
        averages: Whether DistributedDataParallel averages the gradient of ``logit_scale``. If not, this does.

    Raises:
        ValueError: The loss trains modules of its own, or compares two views of an image.

    Example:
        >>> model_loss = ModelLoss(openclip_ext.create_loss("neuclip", embed_dim=512), model)
        >>> optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4)
        >>> model_loss.separate_rate(optimizer)
        >>> model_loss(model(image, text)).backward()
        >>> model_loss.step(optimizer)
    """

    def __init__(self, loss: ContrastiveLoss, model: nn.Module, averages: bool = True) -> None:
        if loss.model_head() is not None or loss.views > 1:
            raise ValueError(
                f"{type(loss).__name__} trains modules of its own or compares two views of an image: only "
                "openclip_ext.training.main does that"
            )
        prepare_for(loss, model, set_logit_scale=True)
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
            outputs: Of OpenCLIP's models (``output_dict=True``), or of a CLIP, SigLIP or dual encoder of ``transformers``.
            index: ``(B_local,)`` positions of the samples in the training set, where the loss needs them.
            training: False for validation data, which have no place in the loss's state. They get OpenCLIP's loss over this
                process's samples, which also makes different losses comparable.
            positives: Which captions are equal, for a loss with ``equal_captions``, as in its ``forward``.
            reference: A reference model's embeddings, for a loss with ``reference_dim``, as in its ``forward``.
        """
        features = self._features(outputs)
        if not training:
            similarities = features["image_features"].float() @ features["text_features"].float().T
            return symmetric_cross_entropy(features["logit_scale"] * similarities)
        return self.loss(**features, index=index, positives=positives, reference=reference)

    def _features(self, outputs: Mapping[str, Any]) -> dict[str, Any]:
        if not isinstance(outputs, Mapping):
            raise ValueError(
                f"the model returned a {type(outputs).__name__}, expected a dictionary: output_dict=True (OpenCLIP)"
            )
        if "image_features" in outputs:
            return dict(outputs)
        if "image_embeds" not in outputs:
            raise ValueError(
                f"the model returned {', '.join(outputs)}: expected image_features and text_features (OpenCLIP), or "
                "image_embeds and text_embeds (transformers)"
            )
        return {
            "image_features": outputs["image_embeds"],
            "text_features": outputs["text_embeds"],
            "logit_scale": self.logit_scale.exp(),
            "logit_bias": self._logit_bias,
        }

    def separate_rate(self, optimizer: Optimizer) -> None:
        """Give the temperature a group of its own, if the loss sets its learning rate. Call it before making a schedule."""
        rate = self.loss.logit_scale_lr
        if rate is None:
            return
        for group in optimizer.param_groups:
            group["params"] = [parameter for parameter in group["params"] if parameter is not self.logit_scale]
        optimizer.add_param_group({"params": [self.logit_scale], "lr": rate, "weight_decay": 0.0})

    def before_step(self, optimizer: Optimizer) -> None:
        """Set the temperature's learning rate, which follows no schedule. Call it before ``optimizer.step()``.

        Raises:
            ValueError: The temperature shares its group with other parameters.
        """
        self._before = self.logit_scale.detach().clone()
        if not self._averages and self.logit_scale.grad is not None:
            self.logit_scale.grad = distributed.all_reduce_sum(self.logit_scale.grad) / distributed.world_size()
        if self.loss.logit_scale_lr is None:
            return
        (group,) = (g for g in optimizer.param_groups if any(p is self.logit_scale for p in g["params"]))
        if len(group["params"]) > 1:
            raise ValueError(
                f"the loss sets the temperature's learning rate to {self.loss.logit_scale_lr:g}, but logit_scale shares its "
                "group with other parameters: call separate_rate(optimizer) once, before you make a schedule"
            )
        group["lr"] = self.loss.logit_scale_lr

    def after_step(self) -> None:
        """Bound the temperature. Call it after ``optimizer.step()``."""
        self.loss.finish_logit_scale_step(self.logit_scale, self._before)

    def step(self, optimizer: Optimizer) -> None:
        """Call ``optimizer.step()``, with what comes before and after it."""
        self.before_step(optimizer)
        optimizer.step()
        self.after_step()

    def check_loop(self, accumulation: int, repeats: bool) -> None:
        """Raise ValueError for a loop that would update the loss's state wrongly, or in which each process trains alone.

        Args:
            accumulation: Micro-batches in an optimizer step.
            repeats: Whether an epoch's last batch is filled up with samples that came before.
        """
        if accumulation > 1 and self.loss.keeps_state:
            raise ValueError(
                f"the gradients of {accumulation} batches are accumulated, and each would update the loss's state: do not "
                f"accumulate. Make the batch {accumulation} times as large; if memory does not suffice, call "
                "openclip_ext.integrations.micro_batches.in_micro_batches(model, size) on the model first"
            )
        if repeats and self.loss.needs_index:
            raise ValueError(
                "the processes fill up the last batch of an epoch with samples that came before. Drop it: drop_last=True of "
                "the DataLoader (accelerate) or of a DistributedSampler (Lightning), dataloader_drop_last=True (Hugging Face)"
            )
        if processes := distributed.unconnected_processes():
            raise ValueError(
                f"{processes} processes were started, and the trainer did not connect them: each would train alone. On a CPU, "
                "say so: use_cpu=True in TrainingArguments (Hugging Face), cpu=True in Accelerator"
            )

    def state_dict(self) -> dict[str, Any]:
        """Return the loss's state, each process's part of the tables, and the temperature. All processes must call it."""
        tables = {name: table.rows(0, table.size) for name, table in self.loss.tables().items()}
        parts = distributed.all_gather_object(tables)
        return {
            "loss": {name: value.cpu() for name, value in self.loss.replicated_state().items()},
            "tables": {name: [part[name] for part in parts] for name in tables},
            LOGIT_SCALE: self.logit_scale.detach().cpu().clone(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore :meth:`state_dict`, which any number of processes may have saved.

        Raises:
            ValueError: It is of a loss with other options or of other data.
        """
        state = read_as(dict[str, Any], state, "the saved loss")
        saved = read_as(dict[str, list[Any]], state.get("tables"), "tables of the saved loss")
        tables = {name: [part.numpy() for part in parts] for name, parts in saved.items()}
        self.loss.restore_state(state["loss"], tables, "the saved loss")
        with torch.no_grad():
            self.logit_scale.copy_(state[LOGIT_SCALE])
