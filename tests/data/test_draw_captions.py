"""``--draw-captions``: in each epoch one of a sample's captions, by the seed alone."""

import json
from pathlib import Path

import pytest
import torch

from openclip_ext.data.build import build_train_loader
from openclip_ext.data.hashing import hash_text
from openclip_ext.data.source import BadSampleError, RawSample, SampleKeys, decode_image
from openclip_ext.data.spec import DataSpec
from openclip_ext.data.synthetic import SyntheticSource
from openclip_ext.data.train_loader import TrainLoader, TrainLoaderConfig
from tests.data.shards import image_bytes, write_tar

SAMPLES, CAPTIONS = 12, 5


@pytest.fixture(scope="module")
def shard(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Samples with a text and five more captions in a list, as COCO's."""
    members = []
    for number in range(SAMPLES):
        captions = {"captions": [f"{number} in other words {other}" for other in range(CAPTIONS)]}
        members += [
            (f"{number:03d}.jpg", image_bytes(number)),
            (f"{number:03d}.txt", f"{number}".encode()),
            (f"{number:03d}.json", json.dumps(captions).encode()),
        ]
    folder: Path = tmp_path_factory.mktemp("coco")
    return str(write_tar(folder / "00000.tar", members))


def _captions(shard: str, key: str, epoch: int = 0, skip: int = 0, **options) -> dict[int, str]:
    """The caption of each sample in an epoch, told by its hash."""
    known = {hash_text(f"{number}"): f"{number}" for number in range(SAMPLES)}
    for number in range(SAMPLES):
        for other in range(CAPTIONS):
            known[hash_text(f"{number} in other words {other}")] = f"{number} in other words {other}"
    loader = build_train_loader(
        DataSpec(source=shard, caption_key=key),
        TrainLoaderConfig(batch_size=2, caption_hash=True, **options),
        preprocess=lambda image: torch.zeros(1),
        tokenizer=lambda text: torch.zeros(1, 2),
    )
    progress = [loader.layout | {"batches": skip}] if skip else None
    return {
        index: known[text]
        for batch in loader.iterate(epoch, progress)
        for index, text in zip(batch["index"].tolist(), batch["caption_hash"].tolist(), strict=True)
    }


def test_without_it_the_first_counts(shard: str) -> None:
    assert _captions(shard, "txt;json:captions") == {number: f"{number}" for number in range(SAMPLES)}
    assert _captions(shard, "json:captions") == {number: f"{number} in other words 0" for number in range(SAMPLES)}


def test_every_caption_of_all_keys_comes_in_some_epoch(shard: str) -> None:
    epochs = [_captions(shard, "txt;json:captions", epoch, draw_captions=True) for epoch in range(40)]
    for number in range(SAMPLES):
        drawn = {captions[number] for captions in epochs}
        assert drawn == {f"{number}", *(f"{number} in other words {other}" for other in range(CAPTIONS))}


def test_it_depends_on_the_seed_and_the_epoch_alone(shard: str) -> None:
    whole = _captions(shard, "json:captions", epoch=1, draw_captions=True)
    rest = _captions(shard, "json:captions", epoch=1, skip=3, draw_captions=True)
    assert len(rest) == SAMPLES - 6
    assert rest == {index: whole[index] for index in rest}
    assert whole != _captions(shard, "json:captions", epoch=1, draw_captions=True, seed=1)
    assert whole != _captions(shard, "json:captions", epoch=2, draw_captions=True)


@pytest.mark.parametrize(
    "content", [{"captions": []}, {"captions": ["a", 1]}, {"captions": {"a": "b"}}, {"other": "a"}]
)
def test_what_is_no_list_of_texts_is_a_bad_sample(content: dict) -> None:
    sample = RawSample(0, {"jpg": image_bytes(0), "json": json.dumps(content).encode()})
    with pytest.raises(BadSampleError, match="or a list of texts"):
        SampleKeys("jpg", "json:captions").decode(sample, decode_image)


def test_data_of_one_caption_are_refused() -> None:
    with pytest.raises(ValueError, match="--draw-captions is for shards"):
        TrainLoader(
            SyntheticSource(),
            TrainLoaderConfig(batch_size=2, draw_captions=True),
            preprocess=lambda image: torch.zeros(1),
            tokenizer=lambda text: torch.zeros(1, 2),
        )
