"""Batches whose samples all come from the same source, which is one ``::`` component of ``--train-data``."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from itertools import islice
from typing import Any

from torch import Tensor

from openclip_ext.data.hashing import Purpose, hash_int
from openclip_ext.data.loader.train_loader import ONE_EPOCH, Interruptible, TrainLoader
from openclip_ext.data.sources.source import Source


class SingleSourceLoader:
    """Training batches like those of :class:`TrainLoader`, but each step's samples, on all ranks, come from one source.

    Each source has a loader with its own workers. A source's order, bad samples and progress ignore the other sources.
    The source of a step is drawn with probabilities proportional to the samples that each source has left in the epoch, as
    if the steps of all sources were shuffled. Every rank draws the same source without communication.

    Args:
        source: The samples of all sources.
        loaders: A loader for each source, with the same layout. Their samples have the indices of ``source``.
    """

    def __init__(self, source: Source, loaders: Sequence[TrainLoader]) -> None:
        self.source = source
        self._loaders = tuple(loaders)
        self._digests = [loader.layout["data"] for loader in loaders]
        layout = loaders[0].layout
        self._accum_freq = layout["accum_freq"]
        self._step_samples = layout["batch_size"] * layout["accum_freq"] * layout["world_size"]
        # Number of samples that each source has left in the epoch; None if its loader is done. Empty between epochs.
        self._left: list[int | None] = []
        self._loaded: dict[str, int | None] = {}

    @property
    def num_samples(self) -> int:
        """Number of samples ``n`` of all sources, including excluded samples."""
        return self.source.num_samples

    @property
    def batches_per_epoch(self) -> int:
        """Number of micro-batches of each rank in a full epoch."""
        return sum(loader.batches_per_epoch for loader in self._loaders)

    def bad_counts(self) -> tuple[int, int]:
        """See :meth:`TrainLoader.bad_counts`."""
        shared, own = zip(*(loader.bad_counts() for loader in self._loaders), strict=True)
        return sum(shared), sum(own)

    def state_dict(self) -> dict[str, Any]:
        """Return the progress of each source, in plain types. Collective: all ranks call it."""
        states = [loader.state_dict() for loader in self._loaders]
        return {
            # A TrainLoader of all sources rejects this progress, because the entries belong to other data.
            "progress": [entry for state in states for entry in state["progress"]],
            "bad": {state["bad"]["data"]: state["bad"] for state in states},
            "left": dict(zip(self._digests, self._left, strict=True)) if self._left else self._loaded,
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore a :meth:`state_dict`; the next :meth:`iterate` continues from it.

        Raises:
            ValueError: The state belongs to other sources, or to a loader that mixes sources.
        """
        progress, bad = state_dict.get("progress", ()), state_dict.get("bad", {})
        if any(entry["data"] not in self._digests for entry in progress):
            raise ValueError(
                "cannot resume mid-epoch: the checkpoint was made without --single-source-batches, or with other sources. "
                "Use the same flags and data, or --resume an end-of-epoch checkpoint under a new --name"
            )
        for digest, loader in zip(self._digests, self._loaders, strict=True):
            own = [entry for entry in progress if entry["data"] == digest]
            loader.load_state_dict({"progress": own, "bad": bad.get(digest, {})})
        self._left, self._loaded = [], dict(state_dict.get("left", {}))

    def iterate(self, epoch: int, interruptible: Interruptible = nullcontext) -> Iterator[dict[str, Tensor]]:
        """Yield an epoch, or its rest after :meth:`load_state_dict`. See :meth:`TrainLoader.iterate`."""
        whole = {loader.layout["data"]: loader.layout["epoch_samples"] for loader in self._loaders}
        self._left, self._loaded = [self._loaded.get(digest, whole[digest]) for digest in self._digests], {}
        for loader, digest, left in zip(self._loaders, self._digests, self._left, strict=True):
            loader.begin(epoch, is_fresh=left == whole[digest])  # iterate does this only at the loader's first step
        epochs, own = [loader.iterate(epoch, interruptible) for loader in self._loaders], self._left
        while (number := self._draw(epoch)) is not None:
            batch, left = next(epochs[number], None), self._left[number]
            self._left[number] = None if batch is None or left is None else left - self._step_samples
            if batch is None:
                continue
            yield batch
            yield from islice(epochs[number], self._accum_freq - 1)
            if self._left is not own:
                raise RuntimeError(ONE_EPOCH)
        self._left = []

    def _draw(self, epoch: int) -> int | None:
        """Return the number of the source of the next step; None at the end of the epoch."""
        weights = [0 if left is None else max(left, 1) for left in self._left]
        if not (total := sum(weights)):
            return None
        place = hash_int(Purpose.SINGLE_SOURCE, self._loaders[0].seed, epoch, total) % total
        number = 0
        while place >= weights[number]:
            place -= weights[number]
            number += 1
        return number


AnyTrainLoader = TrainLoader | SingleSourceLoader
