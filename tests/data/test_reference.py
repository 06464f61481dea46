"""Batches contain the reference model's embeddings of their samples. Files that are corrupt or of other data are rejected."""

import json
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch

from openclip_ext.cli.errors import UsageError
from openclip_ext.data.loader.build import build_source, build_train_loader
from openclip_ext.data.loader.config import TrainLoaderConfig
from openclip_ext.data.reference import ABOUT, IMAGES, TEXTS, EmbeddingStore
from openclip_ext.data.sources.spec import DataSpec
from tests.data.shards import write_shards
from tests.training.runs import NUM_SAMPLES

WIDTH = 5


def write_store(folder: Path, shards: str, width: int = WIDTH, **changed: object) -> Path:
    """Write a reference folder with random embeddings for some shards; return its path."""
    folder.mkdir()
    source = build_source(DataSpec(shards))
    random = np.random.default_rng(0)
    for name in (IMAGES, TEXTS):
        rows = random.normal(size=(source.num_samples, width))
        np.save(folder / name, (rows / np.linalg.norm(rows, axis=1, keepdims=True)).astype(np.float16))
    about = {"samples": source.num_samples, "width": width, "data": source.index_digest, "logit_scale": 20.0} | changed
    (folder / ABOUT).write_text(json.dumps(about))
    return folder


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_have_the_rows_of_their_samples(shards, tmp_path, workers):
    store = EmbeddingStore.open(write_store(tmp_path / "store", shards))
    config = TrainLoaderConfig(batch_size=8, workers=workers)
    spec = DataSpec(shards, reference=store.folder)
    loader = build_train_loader(
        spec, config, preprocess=lambda image: torch.zeros(1), tokenizer=lambda texts: torch.zeros(len(texts), 1)
    )
    for batch in loader.iterate(0):
        image, text = store.rows(batch["index"])
        assert torch.equal(batch["reference_image"], image) and torch.equal(batch["reference_text"], text)
        assert image.shape == (8, WIDTH) and image.dtype == torch.float16


def test_a_part_is_asked_for_by_place(shards, tmp_path):
    store = EmbeddingStore.open(write_store(tmp_path / "store", shards))
    places = torch.tensor([1, 0, 1])
    part = store.part([7, 3])
    assert torch.equal(part.rows(places)[0], store.rows(torch.tensor([3, 7, 3]))[0])
    pickled = pickle.dumps(part)
    assert len(pickled) < 1000, "the pickle contains embeddings; expected only the paths of the files"
    assert torch.equal(pickle.loads(pickled).rows(places)[1], part.rows(places)[1])


def test_what_does_not_fit_is_refused(shards, tmp_path):
    def refused(folder: Path, match: str) -> None:
        with pytest.raises(UsageError, match=match):
            build_source(DataSpec(shards, reference=folder))

    refused(tmp_path / "nowhere", r"not finished .*\. Start openclip-ext embed again")
    refused(write_store(tmp_path / "other", shards, data="of others"), "--train-data: expected data .*of others")
    fewer = write_store(tmp_path / "fewer", write_shards(tmp_path / "small", [5])[0])
    refused(fewer, f"--train-data: expected samples {NUM_SAMPLES}, found 5")
    for key, kept in (("image_key", "jpg;png;jpeg;webp"), ("caption_key", "txt")):
        refused(
            write_store(tmp_path / key, shards, **{key: "json:b"}), f"--train-data: expected {key} {kept}, found json:b"
        )
    cut = write_store(tmp_path / "cut", shards)
    (cut / TEXTS).write_bytes((cut / TEXTS).read_bytes()[:-10])
    refused(cut, "texts.npy: missing or truncated.*Remove the folder, and start openclip-ext embed again")
    for key in ("logit_scale", "samples"):
        refused(write_store(tmp_path / key, shards, **{key: None}), "embeddings.json: missing or truncated")
    (broken := write_store(tmp_path / "broken", shards)).joinpath(ABOUT).write_text("[1]")
    refused(broken, "embeddings.json: missing or truncated")
    for name in (IMAGES, TEXTS):
        wide = write_store(tmp_path / name, shards, width=WIDTH)
        np.save(wide / name, np.zeros((NUM_SAMPLES, WIDTH + 1), np.float16))
        refused(wide, rf"{name}: .*expected \(84, 5\) float16")
    drawn = TrainLoaderConfig(batch_size=8, draw_captions=True)
    with pytest.raises(ValueError, match="--draw-captions: expected no --reference"):
        build_train_loader(
            DataSpec(shards, reference=write_store(tmp_path / "one", shards)), drawn, preprocess=str, tokenizer=str
        )
