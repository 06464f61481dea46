"""Fixtures with a tiny model, which is loaded only once."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from openclip_ext.evaluation.encoder import Encoder
from openclip_ext.evaluation.models import OpenedModel, open_model
from tests.evaluation import datasets


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the tiny model's configuration and checkpoints ``epoch_1.pt`` and ``epoch_2.pt``."""
    folder = tmp_path_factory.mktemp("tiny")
    datasets.tiny_checkpoint(folder)
    datasets.tiny_checkpoint(folder, seed=3, file_name="epoch_2.pt")
    return folder


@pytest.fixture(scope="session")
def tiny(tiny_folder: Path) -> OpenedModel:
    """Return the tiny model of ``epoch_1.pt``."""
    return open_model(tiny_folder / "epoch_1.pt", datasets.TINY_MODEL)


@pytest.fixture
def model_arguments(tiny_folder: Path) -> list[str]:
    """Return the command-line arguments of an evaluation that load the tiny model of ``epoch_1.pt``."""
    model = ["--model", datasets.TINY_MODEL, "--checkpoint", str(tiny_folder / "epoch_1.pt")]
    return [*model, "--device", "cpu", "--workers", "0"]


@pytest.fixture
def make_encoder(tiny: OpenedModel) -> Callable[..., Encoder]:
    """Return a function that creates an encoder of the tiny model with an empty cache; options replace the defaults."""

    def make(**options) -> Encoder:
        settings = {"batch_size": 7, "workers": 0, "device": torch.device("cpu"), **options}
        return Encoder(tiny.model, tiny.transform, tiny.tokenizer, **settings)

    return make
