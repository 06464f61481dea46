"""The flags end in ``config.py``: behind it typed, frozen configurations, and a training that knows no loss."""

import ast
from pathlib import Path

import pytest
import torch

import openclip_ext
from openclip_ext.training.config import TrainingConfig, training_config
from openclip_ext.training.flags import parse

PACKAGE = Path(openclip_ext.__file__).parent
TRAINING = sorted((PACKAGE / "training").glob("*.py"))


def config_of(*argv: str) -> TrainingConfig:
    args, choice = parse(["--name", "run", *argv])
    args.local_rank = 0
    return training_config(args, choice, torch.device("cpu"))


@pytest.mark.parametrize("path", TRAINING, ids=lambda path: path.name)
def test_training_knows_no_loss_by_name(path):
    """What losses and options there are is asked of the registry; the recipes, which name some, are in a folder."""
    imported = {node.module or "" for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ImportFrom)}
    asked = {f"openclip_ext.losses{module}" for module in ("", ".registry", ".options", ".heads")}
    assert {module for module in imported if module.startswith("openclip_ext.losses")} <= asked


def test_flags_reach_their_parts():
    config = config_of(
        *("--train-data", "x.tar", "--batch-size", "32", "--accum-freq", "4", "--lr", "3e-4", "--wd", "0.3"),
        *("--lock-image", "--lock-image-unlocked-groups", "2", "--force-image-size", "96", "--grad-clip-norm", "1"),
        *("--warmup", "7", "--epochs", "3", "--save-frequency", "2", "--val-data", "v.tar", "--remote-sync", "s3://b/"),
        *("--report-to", "tensorboard", "--precision", "amp", "--use-bn-sync", "--resume", "latest", "--logs", "L"),
    )
    assert config.global_batch == 128
    assert (config.optimizer.lr, config.optimizer.weight_decay, config.schedule.warmup) == (3e-4, 0.3, 7)
    assert (config.model.lock_image_unlocked_groups, config.model.lock_text) == (2, False)
    assert (config.model.force_image_size, config.model.precision, config.step.precision) == (96, "amp", "amp")
    assert config.step.grad_clip_norm == 1.0
    assert (config.length.epochs, config.saving.every_epochs, config.saving.name) == (3, 2, "run")
    assert (config.data.source, config.evaluation.val_data.source) == ("x.tar", "v.tar")
    assert config.folder.remote == "s3://b/run"
    assert config.reporting.destinations == {"tensorboard"}
    assert config.parallel.sync_batchnorm and config.folder.resume_latest
    assert config.folder.folder == Path("L/run")
    assert config.flags["checkpoint_path"] == "L/run/checkpoints"


def test_without_training_data_there_is_nothing_to_train_on():
    assert config_of("--val-data", "v.tar").data is None
    assert config_of("--dataset-type", "synthetic").data is not None


def test_flags_for_other_losses_are_named():
    ignored = config_of("--loss", "neuclip", "--local-loss", "--loss-dist-impl", "shift", "--seed", "3")
    assert ignored.loss.without_effect == ("--local-loss", "--loss-dist-impl")
    assert config_of("--loss", "siglip", "--loss-dist-impl", "shift").loss.without_effect == ()
    assert config_of("--coca-caption-loss-weight", "1", "--local-loss").loss.without_effect == ()
