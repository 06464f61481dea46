"""PyTorch Lightning: two processes train as one, resuming is bitwise exact, and the temperature keeps its learning rate."""

import os

import pytest
import torch

pytest.importorskip("lightning")

import lightning
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader, DistributedSampler

from openclip_ext import distributed
from openclip_ext.integrations.lightning import ContrastiveModule
from openclip_ext.losses.registry import create_loss
from tests.integrations import towers
from tests.integrations.towers import BATCH, LR_TAU, pairs, stateful_loss
from tests.training.tiny import WIDTH, tiny_model


class Module(ContrastiveModule):
    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-2, momentum=0.9)
        self.model_loss.separate_rate(optimizer)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)]


def train(folder, epochs=2, resume=None, rank=0, processes=1, weights_only=None, loss=stateful_loss, **options):
    train_set = pairs()
    sampler = DistributedSampler(train_set, processes, rank, drop_last=True)
    loader = DataLoader(train_set, BATCH // processes, sampler=sampler)
    module = Module(tiny_model(), loss)
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
    trainer = lightning.Trainer(max_epochs=epochs, default_root_dir=folder, **quiet, **options)
    trainer.fit(module, loader, DataLoader(pairs(index=False), BATCH), ckpt_path=resume, weights_only=weights_only)
    return trainer, module, towers.final_state(module.model, module.model_loss.loss)


def local_loss():
    return create_loss("openclip", embed_dim=WIDTH, local_loss=True, gather_with_grad=True)


def _on_this_rank(folder):
    two = {"rank": int(os.environ["RANK"]), "processes": 2, "devices": 2, "strategy": "ddp"}
    whole = train(folder / "whole", **two)
    # OpenCLIP's loss of a process is the loss of its own samples.
    local, *_ = train(folder / "local", epochs=1, loss=local_loss, **two)
    for name in ("train_loss", "val_loss"):
        first, second = distributed.all_gather_object(local.callback_metrics[name].item())
        assert first == second  # a ReduceLROnPlateau that monitors it sets the same learning rate in each process
    stopped, *_ = train(folder / "stopped", epochs=1, **two)
    resumed = train(folder / "resumed", resume=stopped.checkpoint_callback.best_model_path, **two)
    example = towers.example("lightning_module.py", *towers.FEW, "--devices", "2", "--output", str(folder / "example"))
    return {"whole": whole[-1], "resumed": resumed[-1], "example": example}


def test_two_processes_train_as_one_and_resume_and_the_example_runs(tmp_path):
    trainer, module, single = train(tmp_path / "single")
    towers.assert_two_processes_train_as_one(_on_this_rank, tmp_path, single)
    (group,) = (group for group in trainer.optimizers[0].param_groups if group["params"] == [module.model.logit_scale])
    assert LR_TAU / 2 <= group["lr"] <= LR_TAU  # the schedule takes one more step at the end
    assert trainer.callback_metrics.keys() >= {"train_loss", "val_loss"}


def test_accumulation_and_a_sampler_of_another_number_of_processes_are_refused(tmp_path):
    with pytest.raises(ValueError, match="do not accumulate"):
        train(tmp_path, accumulate_grad_batches=2)
    with pytest.raises(ValueError, match="for 2 processes, not 1"):
        train(tmp_path, processes=2)


def test_a_checkpoint_from_the_middle_of_an_epoch_warns(tmp_path, recwarn):
    saved = ModelCheckpoint(tmp_path / "saved", every_n_train_steps=2, save_top_k=-1, filename="{step}")
    train(tmp_path / "whole", callbacks=[saved])
    assert not any("middle of an epoch" in str(warning.message) for warning in recwarn)
    with pytest.warns(UserWarning, match="after 2 batches"):
        train(tmp_path / "resumed", resume=tmp_path / "saved" / "step=2.ckpt", weights_only=False)
