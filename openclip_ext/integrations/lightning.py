"""Use this package's losses in PyTorch Lightning."""

from collections.abc import Callable
from typing import Any

import lightning
import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DistributedSampler

from openclip_ext.contrastive.loss import ContrastiveLoss
from openclip_ext.integrations.model_loss import ModelLoss, split_batch


class ContrastiveModule(lightning.LightningModule):
    """A Lightning module that trains a two-tower model. Pass ``optimizer``, or override ``configure_optimizers``.

    Batches are dictionaries with the model's inputs, ``"index"`` (``openclip_ext.data.with_index``) if the loss needs it, and
    ``"positives"`` if the loss has ``equal_captions``.

    Args:
        model: Two-tower model of OpenCLIP (``output_dict=True``) or ``transformers``.
        loss: Loss from ``openclip_ext.create_loss``. For several processes, pass a function that creates the loss, because
            the loss must be created after Lightning has connected the processes.
        optimizer: Function that creates an optimizer for a list of parameters.

    Attributes:
        model_loss: The loss, which exists after ``configure_model``. It is not a submodule, because
            DistributedDataParallel would then overwrite state that differs between processes.
    """

    _has_started = False

    def __init__(
        self,
        model: nn.Module,
        loss: ContrastiveLoss | Callable[[], ContrastiveLoss],
        optimizer: Callable[..., Optimizer] = torch.optim.AdamW,
    ) -> None:
        super().__init__()
        self.model = model
        if isinstance(loss, ContrastiveLoss):
            self.model_loss = ModelLoss(loss, model)
        else:
            self._create_loss = loss
        self._optimizer = optimizer

    def configure_model(self) -> None:
        if not hasattr(self, "model_loss"):
            self.model_loss = ModelLoss(self._create_loss(), self.model)

    def configure_optimizers(self) -> Any:
        optimizer = self._optimizer(self.model.parameters())
        self.model_loss.separate_rate(optimizer)
        return optimizer

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        inputs, for_loss = split_batch(batch)
        loss = self.model_loss(self.model(**inputs), **for_loss)
        self.log("train_loss_step", loss.detach())  # with some losses, of this process's samples only
        # The epoch's mean is equal in all processes, so a schedule that monitors it sets equal learning rates.
        self.log("train_loss", loss.detach(), on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def validation_step(self, batch: dict[str, Any], batch_idx: int) -> None:
        inputs, _ = split_batch(batch)
        # Without sync_dist, a schedule that monitors val_loss would set another learning rate in each process.
        self.log("val_loss", self.model_loss(self.model(**inputs), training=False), sync_dist=True)

    def on_train_start(self) -> None:
        sampler: Any = getattr(self.trainer.train_dataloader, "sampler", None)
        repeats = False
        if isinstance(sampler, DistributedSampler):
            repeats = sampler.total_size > len(sampler.dataset)  # type: ignore[arg-type]
            if sampler.num_replicas != self.trainer.world_size:
                raise ValueError(
                    f"the DistributedSampler is for {sampler.num_replicas} processes, not {self.trainer.world_size}: create "
                    "the sampler in train_dataloader() with trainer.world_size and global_rank"
                )
        self.model_loss.check_loop(self.trainer.accumulate_grad_batches, repeats)
        self._has_started = False

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx and not self._has_started and not hasattr(self.trainer.train_dataloader, "load_state_dict"):
            rank_zero_warn(
                f"the checkpoint is from the middle of an epoch, after {batch_idx} batches. Lightning now repeats these "
                f"batches and omits the last {batch_idx}. Resume from the end of an epoch, or use a loader with state_dict()"
            )
        self._has_started = True

    def on_train_epoch_start(self) -> None:
        self.model_loss.loss.start_epoch(self.current_epoch)

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        self.model_loss.before_step(optimizer)

    def optimizer_step(self, *args: Any, **options: Any) -> None:
        super().optimizer_step(*args, **options)
        self.model_loss.after_step()

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["contrastive_loss"] = self.model_loss.state_dict()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.model_loss.load_state_dict(checkpoint.get("contrastive_loss", {}))
