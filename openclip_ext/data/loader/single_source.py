"""Batches whose samples all come from the same source, which is one ``::`` component of ``--train-data``."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
from torch import Tensor

from openclip_ext.data.hashing import Purpose, hash64, permutation
from openclip_ext.data.loader.train_loader import ONE_EPOCH, Interruptible, TrainLoader
from openclip_ext.data.sources.source import Source


class SingleSourceLoader:
    """Training batches like those of :class:`TrainLoader`, but each step's samples, on all ranks, come from one source.

    Each source has a loader with its own workers. A source's order, bad samples and progress ignore the other sources.
    The steps of all sources are shuffled together; every rank computes the same order.

    Args:
        source: The samples of all sources.
        loaders: A loader for each source, with the same batches. Their samples have the indices of ``source``.
    """

    def __init__(self, source: Source, loaders: Sequence[TrainLoader], accum_freq: int) -> None:
        self.source = source
        self._loaders = tuple(loaders)
        self._accum_freq = accum_freq
        self._loaded: Mapping[str, Any] = {}
        self._progress: dict[str, Any] | None = None  # None between epochs

    @property
    def num_samples(self) -> int:
        """Number of samples ``n`` of all sources, including excluded samples."""
        return self.source.num_samples

    @property
    def batches_per_epoch(self) -> int:
        """Number of micro-batches of each rank in an epoch without excluded samples."""
        return sum(loader.batches_per_epoch for loader in self._loaders)

    def bad_counts(self) -> tuple[int, int]:
        """See :meth:`TrainLoader.bad_counts`."""
        shared, own = zip(*(loader.bad_counts() for loader in self._loaders), strict=True)
        return sum(shared), sum(own)

    def state_dict(self) -> dict[str, Any]:
        """Return the progress of each source, in plain types. Collective: all ranks call it."""
        states = {loader.source.digest: loader.state_dict() for loader in self._loaders}
        progress = self._loaded if self._progress is None else self._progress
        return {
            # A TrainLoader of all sources rejects this progress, because it belongs to other data.
            "progress": {**progress, "data": [*states]} if progress.get("steps") else {},
            "sources": states,
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore a :meth:`state_dict`; the next :meth:`iterate` continues from it.

        Raises:
            ValueError: The state is of different sources, or of a loader that mixes sources.
        """
        progress, states = state_dict.get("progress") or {}, state_dict.get("sources", {})
        digests = [loader.source.digest for loader in self._loaders]
        if progress and progress["data"] != digests:
            raise ValueError(
                "cannot resume mid-epoch: the checkpoint was made without --single-source-batches, or with different sources. "
                "Use the same flags and data, or --resume an end-of-epoch checkpoint under a new --name"
            )
        for digest, loader in zip(digests, self._loaders, strict=True):
            loader.load_state_dict(states.get(digest, {}))
        self._loaded, self._progress = progress, None

    def iterate(self, epoch: int, interruptible: Interruptible = nullcontext) -> Iterator[dict[str, Tensor]]:
        """Yield an epoch, or its rest after :meth:`load_state_dict`. See :meth:`TrainLoader.iterate`."""
        left = [loader.begin(epoch) for loader in self._loaders]
        progress, self._loaded = self._loaded or {"epoch": epoch, "steps": 0, "totals": left}, {}
        self._progress = progress = dict(progress)
        rests = [loader.rest(interruptible) for loader in self._loaders]
        for number in self._sources(epoch, progress["totals"])[progress["steps"] :].tolist():
            for micro_batch in range(self._accum_freq):
                batch = next(rests[number])
                progress["steps"] += micro_batch == 0
                yield batch
                if self._progress is not progress:
                    raise RuntimeError(ONE_EPOCH)
        for rest in rests:  # each loader ends its epoch after its last batch
            next(rest, None)
        self._progress = None

    def _sources(self, epoch: int, totals: Sequence[int]) -> np.ndarray:
        """Return the number of the source of each step ``(sum of totals,)`` of an epoch."""
        bits = hash64(Purpose.SINGLE_SOURCE, self._loaders[0].seed, epoch, np.arange(sum(totals)))
        return np.repeat(np.arange(len(totals)), totals)[permutation(bits)]


AnyTrainLoader = TrainLoader | SingleSourceLoader
