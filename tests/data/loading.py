"""Build a training loader over small shards, and read samples from its batches."""

import multiprocessing
import random
import signal
from collections.abc import Sequence
from dataclasses import fields
from itertools import islice
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from openclip_ext.data.loader.build import build_loader
from openclip_ext.data.loader.config import KeepConfig, TrainLoaderConfig
from openclip_ext.data.sources.spec import DataSpec


def tokenize(texts: list[str]) -> Tensor:
    """Return the number in each caption and the caption's length, ``(B, 2)``, in place of token ids."""
    return torch.tensor([[int(text.split()[1]), len(text)] for text in texts])


def preprocess(image: Image.Image) -> Tensor:
    """Return 48 pixel values, and four numbers from the random generators that augmentations may use; shape (52,)."""
    pixels = torch.from_numpy(np.asarray(image.resize((4, 4)), dtype=np.float32)).flatten()
    draws = [torch.rand(()).item(), random.random(), np.random.rand(), torch.randn(()).item()]
    return torch.cat([pixels, torch.tensor(draws)])


def build(
    data: str | Sequence[str] | None,
    preprocess: Any = preprocess,
    tokenizer: Any = tokenize,
    keep: KeepConfig | None = None,
    **options: Any,
) -> Any:
    """Return a training loader. By default it has one rank, a batch of 4 and a shuffle window of 25 samples."""
    spec = {field.name: options.pop(field.name) for field in fields(DataSpec) if field.name in options}
    defaults = {"batch_size": 4, "seed": 7, "rank": 0, "world_size": 1, "shuffle_window": 25}
    config = TrainLoaderConfig(**defaults | options)
    return build_loader(
        DataSpec(data, **spec), config, keep or KeepConfig(), preprocess=preprocess, tokenizer=tokenizer
    )


def rest_of(loader: Any, epoch: int, batches: int) -> list[dict[str, Tensor]]:
    """Stop an epoch after a number of batches; return those that a resume yields."""
    list(islice(loader.iterate(epoch), batches))
    loader.load_state_dict(loader.state_dict())
    return list(loader.iterate(epoch))


def by_index(batches: list[dict[str, Tensor]]) -> dict[int, Tensor]:
    """Map the index of each sample to its pixels."""
    return {int(i): image for batch in batches for i, image in zip(batch["index"], batch["image"], strict=True)}


def indices(batches: list[dict[str, Tensor]]) -> list[int]:
    """Return the sample indices of all batches, in order."""
    return [int(index) for batch in batches for index in batch["index"]]


def assert_equal(first: list[dict[str, Tensor]], second: list[dict[str, Tensor]]) -> None:
    """Assert that two lists of batches are bitwise equal."""
    assert len(first) == len(second)
    for a, b in zip(first, second, strict=True):
        assert a.keys() == b.keys() == {"image", "text", "index"}
        assert all(torch.equal(a[name], b[name]) for name in a)


def train_with_a_fork_server(data: str, sender: Connection) -> None:
    """Read a batch with two workers, send their process IDs, and wait for a signal. A separate process calls this."""
    multiprocessing.set_forkserver_preload(["tests.data.loading"])
    multiprocessing.set_start_method("forkserver", force=True)
    loader = build(data, workers=2)
    next(loader.iterate(0))
    sender.send([worker.pid for worker in loader._loader._iterator._workers])
    signal.pause()
