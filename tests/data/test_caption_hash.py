"""``caption_hash``: equal for equal captions, the same in every process, and sent only where it is asked for."""

import csv
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from openclip_ext.data.csv import CsvSource
from openclip_ext.data.hashing import hash_text
from openclip_ext.data.train_loader import TrainLoader, TrainLoaderConfig

CAPTIONS = ["a cat", "a dog", "a cat", "left of a dog", "a cat ", "right of a dog", "a dog", "a cat"]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> CsvSource:
    folder: Path = tmp_path_factory.mktemp("captions")
    Image.fromarray(np.zeros((4, 4, 3), dtype=np.uint8)).save(folder / "image.png")
    with open(folder / "pairs.csv", "w", newline="") as file:
        rows = csv.writer(file, delimiter="\t")
        rows.writerows([("filepath", "title"), *((str(folder / "image.png"), caption) for caption in CAPTIONS)])
    return CsvSource(str(folder / "pairs.csv"), "filepath", "title", "\t")


def _hashes(source: CsvSource, **options) -> dict[int, int]:
    config = TrainLoaderConfig(batch_size=4, caption_hash=True, **options)
    loader = TrainLoader(
        source, config, preprocess=lambda image: torch.zeros(3), tokenizer=lambda text: torch.zeros(1, 2)
    )
    found = {}
    for batch in loader.iterate(0):
        assert batch["caption_hash"].dtype == torch.int64
        found |= dict(zip(batch["index"].tolist(), batch["caption_hash"].tolist(), strict=True))
    return found


def test_equal_captions_have_equal_hashes(source: CsvSource) -> None:
    hashes = _hashes(source)
    for first in hashes:
        for second in hashes:
            assert (hashes[first] == hashes[second]) == (CAPTIONS[first] == CAPTIONS[second])


def test_a_hash_is_of_the_caption_alone(source: CsvSource) -> None:
    assert hash_text("a cat") == -6711169336525982361
    assert _hashes(source) == _hashes(source, seed=5)


def test_a_flipped_caption_has_the_hash_of_what_it_says_now(source: CsvSource) -> None:
    allowed = {hash_text(caption) for caption in CAPTIONS}
    per_seed = [_hashes(source, seed=seed, caption_aware_flip=True) for seed in range(4)]
    assert all(set(hashes.values()) <= allowed for hashes in per_seed)
    assert len({hashes[3] for hashes in per_seed}) == 2


def test_nobody_pays_for_it_who_does_not_ask(source: CsvSource) -> None:
    config = TrainLoaderConfig(batch_size=4)
    loader = TrainLoader(
        source, config, preprocess=lambda image: torch.zeros(3), tokenizer=lambda text: torch.zeros(1, 2)
    )
    assert next(loader.iterate(0)).keys() == {"image", "text", "index"}
