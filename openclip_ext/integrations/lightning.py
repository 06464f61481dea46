"""The losses in PyTorch Lightning."""

from collections.abc import Callable
from typing import Any

import lightning
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DistributedSampler

from openclip_ext.contrastive.loss import ContrastiveLoss
from openclip_ext.data.indexing import INDEX
from openclip_ext.integrations.model_loss import ModelLoss


class ContrastiveModule(lightning.LightningModule):
    """Trains a two-tower model. Subclass it and write ``configure_optimizers``, or pass an optimizer.

    Batches are dictionaries: the model's inputs, and ``"index"`` (``openclip_ext.data.with_index``) where the loss needs it.

    Args:
        model: Of OpenCLIP (``output_dict=True``) or ``transformers``.
        loss: From ``openclip_ext.create_loss``.
        optimizer: Makes an optimizer of parameters.

    Attributes:
        model_loss: The loss. It is no submodule: DistributedDataParallel would overwrite the part of its state that each
            process has for itself.
    """

    def __init__(
        self, model: nn.Module, loss: ContrastiveLoss, optimizer: Callable[..., Optimizer] = torch.optim.AdamW
    ) -> None:
        super().__init__()
        self.model = model
        self.model_loss = ModelLoss(loss, model)
        self._optimizer = optimizer

    def configure_optimizers(self) -> Any:
        optimizer = self._optimizer(self.model.parameters())
        self.model_loss.separate_rate(optimizer)
        return optimizer

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        inputs = {name: value for name, value in batch.items() if name != INDEX}
        loss = self.model_loss(self.model(**inputs), batch.get(INDEX))
        self.log("train_loss", loss.detach())
        return loss

    def validation_step(self, batch: dict[str, Any], batch_idx: int) -> None:
        inputs = {name: value for name, value in batch.items() if name != INDEX}
        self.log("val_loss", self.model_loss(self.model(**inputs), training=False))

    def on_train_start(self) -> None:
        sampler: Any = getattr(self.trainer.train_dataloader, "sampler", None)
        repeats = isinstance(sampler, DistributedSampler) and sampler.total_size > len(sampler.dataset)  # type: ignore[arg-type]
        self.model_loss.check_loop(self.trainer.accumulate_grad_batches, repeats)

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
        self.model_loss.load_state_dict(checkpoint["contrastive_loss"])
