"""Unique sample indices for the data sets of other libraries: torch, WebDataset and Hugging Face."""

from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
import webdataset
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler, TensorDataset

from openclip_ext.data import unique_index, with_index
from openclip_ext.data.manifest.manifest import Manifest
from tests.data.shards import write_shards, write_sizes, write_tar


def test_samples_of_map_style_sets_carry_their_position():
    tuples = with_index(TensorDataset(torch.arange(10), torch.arange(10) * 2))
    assert len(tuples) == 10
    assert [tuple(map(int, sample)) for sample in tuples] == [(i, 2 * i, i) for i in range(10)]
    dictionaries = with_index([{"text": str(i)} for i in range(10)])
    for workers in (0, 2):
        batches = list(DataLoader(dictionaries, batch_size=4, shuffle=True, num_workers=workers))
        assert all(batch["text"] == [str(int(i)) for i in batch["index"]] for batch in batches)
        assert sorted(int(i) for batch in batches for i in batch["index"]) == list(range(10))


def test_what_has_no_place_for_an_index_is_refused():
    for dataset, error, message in (
        (iter([1]), TypeError, "a list_iterator has no stable index"),
        ({0: "a"}, TypeError, "a dict has no stable index"),
        (webdataset.DataPipeline(), ValueError, "the shards of the pipeline are unknown"),
        ([torch.arange(3)], TypeError, "a sample is a Tensor: expected a dictionary or a tuple"),
        ([{"index": 7}], ValueError, "already have 'index'"),
    ):
        with pytest.raises(error, match=message):
            with_index(dataset)[0]


class Ordered:
    """A data set that reads its positions in reverse order if it is iterated."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, position: int) -> dict[str, int]:
        return {"number": position}

    def __iter__(self) -> Any:
        return map(self.__getitem__, reversed(range(4)))


@pytest.mark.parametrize(("kind", "is_refused"), [(IterableDataset, True), (object, True), (Dataset, False)])
def test_a_data_set_with_an_order_of_its_own_is_refused(kind: type, is_refused: bool):
    """DataLoader calls ``__iter__`` of an IterableDataset, which an index by position would bypass, but not of a Dataset."""
    dataset: Any = type("Own", (Ordered, kind), {})()
    if is_refused:
        with pytest.raises(TypeError, match="__iter__"):
            with_index(dataset)
    else:
        assert [int(batch["index"]) for batch in DataLoader(with_index(dataset))] == [0, 1, 2, 3]


def test_an_index_that_recurs_is_refused():
    dataset = with_index([{"value": i} for i in range(8)])
    loader = DataLoader(dataset, batch_size=3, sampler=RandomSampler(dataset, replacement=True, num_samples=24))
    with pytest.raises(ValueError, match=r"batch \d: index \d is repeated in this epoch.*without replacement"):
        list(unique_index(loader))
    for _ in range(2):  # two epochs
        assert len(list(unique_index(DataLoader(dataset, batch_size=3, shuffle=True)))) == 3


# ------------------------------------------------------------------ WebDataset


@pytest.fixture
def shards(tmp_path: Path) -> list[str]:
    return write_shards(tmp_path, [5, 3, 4])


def pipeline(shards: Any, **options: Any) -> webdataset.WebDataset:
    return webdataset.WebDataset(shards, **{"shardshuffle": False} | options)


def captions(dataset: Any) -> dict[int, str]:
    return {sample["index"]: sample["txt"].decode() for sample in dataset}


def test_webdataset_samples_have_the_index_that_the_trainer_uses(shards: list[str], tmp_path: Path):
    expected = {index: f"sample {index}" for index in range(12)}
    assert captions(with_index(pipeline(shards))) == expected
    assert captions(with_index(pipeline(shards, shardshuffle=3)).shuffle(100)) == expected
    assert captions(with_index(pipeline(str(tmp_path / "{00000..00002}.tar")))) == expected
    manifest = Manifest.load(tmp_path / "manifest.json")
    assert [shard.first_index for shard in manifest.shards] == [0, 5, 8]
    # A pipeline over some of the shards uses the indices of the full shard list.
    assert min(captions(with_index(pipeline(shards[1:]), shards=shards))) == 5
    dataset = with_index(pipeline(shards)).to_tuple("txt", "index").batched(4)
    for _ in range(2):
        batches = list(unique_index(DataLoader(dataset, batch_size=None, num_workers=2)))
        assert sorted(int(i) for batch in batches for i in batch[1]) == list(range(12))


def test_a_webdataset_may_be_decoded_after_the_index(shards: list[str]):
    """A spawned worker receives the pipeline as a pickle."""
    dataset = with_index(pipeline(shards)).shuffle(4).decode("pil").to_tuple("jpg", "txt", "index")
    loader = DataLoader(dataset, batch_size=None, num_workers=1, multiprocessing_context="spawn")
    decoded = [(image.mode, caption, index) for image, caption, index in loader]
    assert sorted(decoded, key=lambda sample: sample[2]) == [("RGB", f"sample {i}", i) for i in range(12)]


def test_a_webdataset_needs_no_captions(tmp_path: Path):
    """Shards of ImageNet, for example, contain classes instead of captions."""
    for number in range(2):
        members = [(f"{i}.{field}", b"1") for i in range(3) for field in ("jpg", "cls")]
        write_tar(tmp_path / f"{number}.tar", members)
    shards = [str(path) for path in sorted(tmp_path.glob("*.tar"))]
    assert [sample["index"] for sample in with_index(pipeline(shards))] == list(range(6))
    # A manifest that was made with another caption key has the same indices.
    Manifest.scan(shards, caption_key="cls").without([4]).save(tmp_path / "manifest.json")
    assert [sample["index"] for sample in with_index(pipeline(shards))] == [0, 1, 2, 3, 5]


def test_webdataset_indices_that_would_be_wrong_are_refused(shards: list[str], tmp_path: Path):
    write_sizes(tmp_path, [5, 2, 4])
    piped = [f"pipe:cat {shard}" for shard in shards]
    twice = "occur twice in this epoch.*before shuffle.*not use resampled"
    for dataset, message in (
        (with_index(pipeline(shards, resampled=True), shards=shards), twice),
        (with_index(pipeline([shards[0], shards[0]])), twice),
        (with_index(pipeline(shards).shuffle(100)), twice),  # shuffles before the index is added
        (with_index(pipeline(shards), shards=shards[:2]), "00002.tar is not in the manifest"),
        (with_index(pipeline(piped)), "has more than the 2 samples of the manifest"),
    ):
        with pytest.raises(ValueError, match=message):
            list(islice(dataset, 200))


# ------------------------------------------------------------------ Hugging Face


def test_hugging_face_rows_keep_their_index():
    datasets = pytest.importorskip("datasets")
    dataset = with_index(datasets.Dataset.from_dict({"text": [str(i) for i in range(10)]}))
    assert dataset.column_names == ["text", "index"]
    shuffled = dataset.shuffle(seed=0).select(range(2, 9))
    assert [int(row["text"]) for row in shuffled] == [row["index"] for row in shuffled]
    with pytest.raises(ValueError, match="already"):
        with_index(dataset)
    with pytest.raises(TypeError, match=r"no stable index.*not streaming"):
        with_index(datasets.Dataset.from_dict({"text": ["a"]}).to_iterable_dataset())
