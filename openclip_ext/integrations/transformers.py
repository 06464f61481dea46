"""Use this package's losses in ``transformers.Trainer``. ``openclip_ext.data.with_index`` adds the index to batches."""

from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import ConcatDataset
from transformers import Trainer, TrainerCallback
from transformers.trainer_utils import has_length

from openclip_ext import distributed
from openclip_ext.contrastive.loss import ContrastiveLoss
from openclip_ext.contrastive.model import LOGIT_SCALE
from openclip_ext.evaluation.results import config_digest
from openclip_ext.files.writing import write_atomically
from openclip_ext.integrations.model_loss import ModelLoss, split_batch

LOSS_FILE = "contrastive_loss.pt"


class LossCallback(TrainerCallback):
    """A callback that sets the loss's epoch, bounds the temperature, and saves the loss's state with checkpoints."""

    def __init__(self, model_loss: ModelLoss) -> None:
        self.model_loss = model_loss

    def on_train_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        repeats = args.world_size > 1 and not args.dataloader_drop_last
        self.model_loss.check_loop(args.gradient_accumulation_steps, repeats)
        loader = more["train_dataloader"]
        # sentence-transformers has a last batch for each of several joined data sets.
        has_last_batch = has_length(loader) and not isinstance(loader.dataset, ConcatDataset)
        has_last_batch &= args.world_size == 1 and not args.dataloader_drop_last and self.model_loss.loss.keeps_state
        if has_last_batch and len(loader.dataset) % args.train_batch_size == 1:
            raise ValueError(
                "the last batch of each epoch would have one sample, without negatives: set dataloader_drop_last=True"
            )
        self._next_epoch = 0
        if state.global_step == 0:
            return
        path = self._path(args, state)
        if not path.is_file():
            raise ValueError(f"{path} not found: resume from a checkpoint in output_dir that has this file")
        content = torch.load(path, map_location="cpu", weights_only=True)
        if content["log_digest"] != config_digest(state.log_history):
            raise ValueError(f"{path} belongs to another run: resume from a checkpoint in this run's output_dir")
        self.model_loss.load_state_dict(content)
        self._next_epoch = self.model_loss.loss.epoch

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        # For a data set without a length, state.epoch is a fraction of max_steps. So epochs are counted here.
        epoch = int(state.epoch) if has_length(more["train_dataloader"]) else self._next_epoch
        self.model_loss.loss.start_epoch(epoch)
        self._next_epoch = epoch + 1

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        self.model_loss.before_step(more["optimizer"])

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.model_loss.after_step()

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.save(args, state)

    def save(self, args: Any, state: Any) -> None:
        """Write the loss's state into the folder of the current step's checkpoint. Collective: all ranks call it."""
        content = self.model_loss.state_dict()
        content["log_digest"] = config_digest(state.log_history)  # identifies the run
        if distributed.is_rank0():
            path = self._path(args, state)
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(path, lambda file: torch.save(content, file))

    def _path(self, args: Any, state: Any) -> Path:
        return Path(args.output_dir) / f"checkpoint-{state.global_step}" / LOSS_FILE


class _CallbackWithoutSaving(LossCallback):
    """The callback of a trainer that calls :meth:`LossCallback.save` itself."""

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        pass


class ContrastiveTrainer(Trainer):
    """A ``Trainer`` for two-tower models of ``transformers`` or OpenCLIP, with a loss from ``openclip_ext.create_loss``."""

    def __init__(self, *args: Any, contrastive_loss: ContrastiveLoss, **options: Any) -> None:
        super().__init__(*args, **options)
        if self.model_init is not None:
            raise ValueError(
                "model_init would create a new model, whose temperature the loss has not set: pass model= instead"
            )
        if self.args.remove_unused_columns:
            raise ValueError("the Trainer would remove the index: set remove_unused_columns=False in TrainingArguments")
        self.model_loss = ModelLoss(contrastive_loss, self.model)
        # Without these two attributes, the Trainer would compute no loss for validation data, because they have no labels.
        self.can_return_loss = True
        self.label_names: list[str] = []
        self._callback = _CallbackWithoutSaving(self.model_loss)
        self.add_callback(self._callback)

    def compute_loss(
        self, model: nn.Module, inputs: dict[str, Any], return_outputs: bool = False, **_: Any
    ) -> torch.Tensor | tuple[torch.Tensor, Any]:
        inputs, for_loss = split_batch(inputs)
        inputs.pop("return_loss", None)
        outputs = model(**inputs)
        loss = self.model_loss(outputs, training=model.training, **for_loss)
        return (loss, outputs) if return_outputs else loss

    def _save_checkpoint(self, *args: Any, **options: Any) -> None:
        # The loss is saved first, because the Trainer deletes earlier checkpoints before it calls on_save.
        self._callback.save(self.args, self.state)
        super()._save_checkpoint(*args, **options)

    def get_decay_parameter_names(self, model: nn.Module) -> list[str]:
        """Return the names of the parameters with weight decay. As in OpenCLIP, the temperature has none."""
        return [name for name in super().get_decay_parameter_names(model) if name.rpartition(".")[2] != LOGIT_SCALE]

    def create_optimizer(self, model: nn.Module | None = None) -> Optimizer:
        is_new = self.optimizer is None
        optimizer = super().create_optimizer(model)
        if is_new:
            self.model_loss.separate_rate(optimizer)
        return optimizer

    def log(self, logs: dict[str, float], *args: Any, **options: Any) -> None:
        """Log the trainer's metrics. If they contain the training loss, add the metrics of the contrastive loss."""
        if "loss" in logs:
            logs |= self.model_loss.loss.metrics()
        super().log(logs, *args, **options)
