"""The losses in PyTorch Lightning."""

from collections.abc import Callable
from typing import Any

import lightning
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DistributedSampler

from openclip_ext.contrastive.loss import ContrastiveLoss
from openclip_ext.integrations.model_loss import ModelLoss, split_batch


class ContrastiveModule(lightning.LightningModule):
    """Trains a two-tower model. Subclass it and write ``configure_optimizers``, or pass an optimizer.

    Batches are dictionaries: the model's inputs, and ``"index"`` (``openclip_ext.data.with_index``) where the loss needs it
    (and ``"positives"`` with ``equal_captions``).

    Args:
        model: Of OpenCLIP (``output_dict=True``) or ``transformers``.
        loss: From ``openclip_ext.create_loss``, or a function that creates it. With several processes it must be a
            function: Lightning starts them later.
        optimizer: Makes an optimizer of parameters.

    Attributes:
        model_loss: The loss; if a function creates it, from ``configure_model`` on. It is no submodule:
            DistributedDataParallel would overwrite the part of its state that each process has for itself.
    """

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
        self.log("train_loss", loss.detach())
        return loss

    def validation_step(self, batch: dict[str, Any], batch_idx: int) -> None:
        inputs, _ = split_batch(batch)
        self.log("val_loss", self.model_loss(self.model(**inputs), training=False))

    def on_train_start(self) -> None:
        sampler: Any = getattr(self.trainer.train_dataloader, "sampler", None)
        repeats, processes = False, self.trainer.world_size
        if isinstance(sampler, DistributedSampler):
            repeats = sampler.total_size > len(sampler.dataset)  # type: ignore[arg-type]
            if sampler.num_replicas != processes:
                raise ValueError(
                    f"the DistributedSampler is for {sampler.num_replicas} processes, and there are {processes}, which would "
                    "train on the same samples: make it in train_dataloader(), with self.trainer.world_size and "
                    "self.trainer.global_rank"
                )
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
        self.model_loss.load_state_dict(checkpoint.get("contrastive_loss", {}))
