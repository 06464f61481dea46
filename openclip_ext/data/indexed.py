"""Add a sample index to data sets of other libraries, because losses with per-sample state need it."""

import functools
import itertools
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

INDEX = "index"


class IndexedDataset:
    """A map-style data set whose samples (dictionaries or tuples) contain their position as index."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, position: int) -> Any:
        if not 0 <= position < len(self):
            # A for loop over the data set ends at this error.
            raise IndexError(f"index {position} is out of range: the data set has {len(self)} samples")
        sample = self.dataset[position]
        if isinstance(sample, dict):
            _refuse_taken(sample)
            return sample | {INDEX: position}
        if isinstance(sample, tuple | list):
            return (*sample, position)
        raise TypeError(f"a sample is a {type(sample).__name__}: expected a dictionary or a tuple to add the index to")


def with_index(
    dataset: Any, shards: str | Sequence[str] | None = None, manifest: str | os.PathLike[str] | None = None
) -> Any:
    """Give every sample of a data set an index that is dense from 0, unique, and the same in every epoch.

    - **Map-style sets** (PyTorch, torchvision): dictionaries get the entry ``"index"``, and tuples get one more element.
    - **Hugging Face** ``datasets.Dataset``: gets the column ``"index"``, which stays with its row under ``shuffle``,
      ``filter`` and ``select``. Call ``with_index`` before these methods: otherwise the index has gaps, and ``num_samples``
      of the loss must be larger than the highest index.
    - **WebDataset pipelines**: samples get the entry ``"index"``: the first index of the shard, from a manifest, plus the
      position in the shard. Call ``with_index`` right after ``WebDataset(...)``, before ``shuffle`` and ``decode``. In a
      ``DataPipeline``, ``decode`` needs ``partial=True``, because the index is not bytes.

    Args:
        dataset: A data set or pipeline of one of the kinds above.
        shards: All shards of a WebDataset pipeline. None (default) means to read them from the pipeline.
        manifest: Path of the manifest of a WebDataset pipeline. None (default) means to find or create one.

    Returns:
        A data set of the same kind. A map-style set is wrapped in :class:`IndexedDataset`.

    Raises:
        TypeError: The data set is of a different kind, such as an ``IterableDataset``, whose ``__iter__`` sets the order.
        ValueError: The samples already have an ``"index"``, or the shards of a pipeline are unknown.

    Example:
        >>> dataset = with_index(torchvision.datasets.CocoCaptions(folder, annotations))
        >>> loss = openclip_ext.create_loss("fastclip", embed_dim=512, num_samples=len(dataset))
        >>> for batch in unique_index(DataLoader(dataset, batch_size=64, shuffle=True)):
        ...     loss(..., index=batch[-1])
    """
    if hasattr(dataset, "pipeline") and hasattr(dataset, "compose"):
        indexed = dataset.compose(_WebDatasetIndex(_shards_of(dataset) if shards is None else shards, manifest))
        if hasattr(indexed, "decode"):
            indexed.__class__ = _with_partial_decode(indexed.__class__)
        return indexed
    if hasattr(dataset, "add_column") and hasattr(dataset, "column_names") and hasattr(dataset, "__len__"):
        _refuse_taken(dataset.column_names)
        import numpy as np  # imported late, because the help of training needs no numpy

        return dataset.add_column(INDEX, np.arange(len(dataset)))
    if _has_own_order(dataset):
        raise TypeError(
            f"a {type(dataset).__name__} has its own __iter__, which may shuffle or divide the samples, and with_index would "
            "bypass it: return the index from its __getitem__ instead, as sample | {'index': position}"
        )
    if hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__") and not isinstance(dataset, Mapping):
        return IndexedDataset(dataset)
    raise TypeError(
        f"a {type(dataset).__name__} has no stable index: expected a data set with __getitem__ and __len__, a "
        "datasets.Dataset (one split, not streaming), or a WebDataset pipeline"
    )


def _has_own_order(dataset: Any) -> bool:
    """Return whether ``__iter__`` may set a different order than the positions, as in mosaicml's StreamingDataset.

    DataLoader ignores ``__iter__`` of PyTorch's map-style sets.
    """
    from torch.utils.data import Dataset, IterableDataset

    if isinstance(dataset, Dataset) and not isinstance(dataset, IterableDataset):
        return False
    has_positions = hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")
    return has_positions and hasattr(dataset, "__iter__") and not isinstance(dataset, Mapping | Sequence)


def unique_index(batches: Iterable[Any], key: str | int | None = None) -> Iterator[Any]:
    """Yield the batches of one epoch; raise ValueError if an index is repeated: the loss would update its state twice.

    Args:
        batches: The batches of one epoch, such as a DataLoader. Each batch is a dictionary or a tuple.
        key: Key of the index in a batch. None (default) means ``"index"`` for dictionaries and the last element for tuples.
    """
    seen: set[int] = set()
    for number, batch in enumerate(batches):
        place = key if key is not None else INDEX if isinstance(batch, dict) else -1
        for index in map(int, batch[place]):
            if index in seen:
                raise ValueError(
                    f"batch {number}: index {index} is repeated in this epoch. Expected every sample at most once: sample "
                    "without replacement (no RandomSampler(replacement=True), no resampled=True), use drop_last=True with "
                    "a DistributedSampler, which otherwise pads its last batch, and wrap one epoch at a time"
                )
            seen.add(index)
        yield batch


class _WebDatasetIndex:
    """A pipeline stage that computes the index of each sample from its position in the tar file of its shard."""

    def __init__(self, shards: str | Sequence[str], manifest: str | os.PathLike[str] | None) -> None:
        # Imported late to avoid a cycle: the manifest package imports openclip_ext.data, which imports this module.
        from openclip_ext.data.manifest.find import find_or_create_manifest
        from openclip_ext.data.sources.keys import ANY_FIELD

        found = find_or_create_manifest(shards, manifest, ANY_FIELD, ANY_FIELD)
        self._left_out = frozenset(found.left_out.tolist())
        self._shards = {shard.url: shard for shard in found.shards}

    def __call__(self, samples: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        from openclip_ext.data.storage import is_local, local_path

        seen: set[str] = set()
        for url, of_shard in itertools.groupby(samples, key=lambda sample: str(sample["__url__"])):
            shard = self._shards.get(local_path(url) if is_local(url) else url)
            if shard is None:
                raise ValueError(f"{url} is not in the manifest: name all shards of the pipeline with shards=")
            first_key = None
            for position, sample in enumerate(of_shard):
                if url in seen or sample["__key__"] == first_key:
                    raise ValueError(
                        f"the samples of {url} occur twice in this epoch, so their indices would be repeated. Call "
                        "with_index before shuffle(), and do not use resampled=True"
                    )
                if position >= shard.num_samples:
                    raise ValueError(
                        f"{url} has more than the {shard.num_samples} samples of the manifest: it was changed, or the count "
                        "in sizes.json is too low. Create the manifest again: openclip-ext manifest SHARDS"
                    )
                first_key = sample["__key__"] if first_key is None else first_key
                _refuse_taken(sample)
                index = shard.first_index + position
                if index not in self._left_out:
                    yield sample | {INDEX: index}
            seen.add(url)


@functools.cache
def _with_partial_decode(pipeline: type) -> type:
    """Return a subclass of a pipeline class. Its ``decode`` skips values that are not bytes, such as the index."""

    class Indexed(pipeline):
        def decode(self, *handlers: Any, **options: Any) -> Any:
            return super().decode(*handlers, **{"partial": True, **options})

        def __reduce__(self) -> Any:  # spawned workers receive the pipeline by pickle
            return _restore, (pipeline, self.__dict__)

    return Indexed


def _restore(pipeline: type, state: dict[str, Any]) -> Any:
    indexed: Any = object.__new__(_with_partial_decode(pipeline))
    indexed.__dict__.update(state)
    return indexed


def _shards_of(pipeline: Any) -> list[str]:
    urls = getattr(pipeline.pipeline[0], "urls", None) if pipeline.pipeline else None
    if not urls:
        raise ValueError("the shards of the pipeline are unknown: name them with shards=")
    return list(dict.fromkeys(urls))


def _refuse_taken(names: Iterable[str]) -> None:
    if INDEX in names:
        raise ValueError(
            f"the samples already have {INDEX!r}: rename it, or omit with_index if it numbers the samples from 0"
        )
