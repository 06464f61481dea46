"""The bad samples of a run: the ranks share them, later epochs exclude them, and checkpoints contain them."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from openclip_ext import distributed
from openclip_ext.cli.messages import get_logger
from openclip_ext.data.sources.source import BadDataError, Source

logger = get_logger(__name__)

_MAX_LOGGED = 20


@dataclass(frozen=True)
class BadSample:
    """A bad sample. If it could not be read (``is_read`` is False), the next epoch retries it."""

    index: int
    reason: str
    is_read: bool


class BadSamples:
    """The bad samples that the ranks have shared, and those that this rank has found since the last :meth:`exchange`.

    ``max_fraction`` limits the fraction of bad samples, both in the data set and in the ``epoch_samples`` of an epoch.
    """

    def __init__(self, source: Source, max_fraction: float, epoch_samples: int) -> None:
        self._source = source
        self._max_fraction = max_fraction
        self._epoch_samples = epoch_samples
        self._epoch = 0
        self._found: dict[int, int] = {}  # index -> epoch in which the bad sample was found
        self._unread: set[int] = set()  # indices that could not be read in the current epoch
        self._new: dict[int, BadSample] = {}
        self._num_logged = 0
        self._has_refused = False

    def state_dict(self) -> dict[str, Any]:
        """Return the bad samples that the ranks have shared, in plain Python types."""
        return {"data": self._source.digest, "found": dict(self._found), "unread": sorted(self._unread)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a :meth:`state_dict`; ignore it if it belongs to another data set."""
        if state.get("data") == self._source.digest:
            # JSON turns the indices into strings.
            self._found = {int(index): epoch for index, epoch in state["found"].items()}
            self._unread = set(state["unread"])

    def begin(self, epoch: int, is_fresh: bool) -> np.ndarray:
        """Start or continue an epoch; return the indices that it excludes: ``(k,)`` int64, ascending."""
        self._epoch = epoch
        if is_fresh:
            self._unread = set()
        return np.array(sorted(index for index, met in self._found.items() if met < epoch), dtype=np.int64)

    def add(self, sample: BadSample) -> None:
        """Record a bad sample that this rank has found. With a single rank, raise BadDataError if there are too many."""
        if sample.index in self._unread or self._found.get(sample.index, self._epoch + 1) <= self._epoch:
            return
        if sample.index not in self._new and distributed.is_rank0():
            self._log(sample)
        self._new[sample.index] = sample
        if distributed.world_size() == 1:  # several ranks raise together, in exchange()
            self._refuse_too_many()

    def exchange(self) -> None:
        """Share new bad samples; raise BadDataError on all ranks if there are too many. Collective: all ranks call it."""
        for rank, samples in enumerate(distributed.all_gather_object(list(self._new.values()))):
            for sample in samples:
                if rank and distributed.is_rank0():
                    self._log(sample)
                if sample.is_read:
                    self._found[sample.index] = min(self._epoch, self._found.get(sample.index, self._epoch))
                else:
                    self._unread.add(sample.index)
                self._new.setdefault(sample.index, sample)
        self._refuse_too_many()
        self._new = {}

    def counts(self) -> tuple[int, int]:
        """Return the numbers of bad samples of this epoch: those that the ranks have shared, and new ones of this rank."""
        return sum(met <= self._epoch for met in self._found.values()) + len(self._unread), len(self._new)

    def known(self) -> list[int]:
        """Return the indices of the bad samples of this and earlier epochs."""
        return [*{*self._found, *self._unread, *self._new}]

    def by_shard(self) -> Counter[str]:
        """Return the number of known bad samples per shard."""
        return Counter(self._source.group_of(index)[0] for index in self.known())

    def error(self, problem: str) -> BadDataError:
        """Return an error with ``problem`` and a description of the bad samples."""
        examples = "; ".join(f"sample {sample.index}: {sample.reason}" for sample in list(self._new.values())[:3])
        return BadDataError(f"{problem}. The worst shards: {dict(self.by_shard().most_common(5))}. {examples}")

    def log_epoch(self) -> None:
        """Log how many bad samples were found in the current epoch."""
        met = sum(epoch == self._epoch for epoch in self._found.values())
        if (met or self._unread) and distributed.is_rank0():
            logger.warning(
                f"Epoch {self._epoch} found {met:,} bad samples, which later epochs exclude, and {len(self._unread):,} that "
                f"could not be read, which the next epoch retries. The worst shards: {dict(self.by_shard().most_common(5))}"
            )

    def _log(self, sample: BadSample) -> None:
        self._num_logged += 1
        if self._num_logged <= _MAX_LOGGED:
            name = self._source.group_of(sample.index)[0]
            logger.warning(f"Bad sample {sample.index} in {name} is replaced by another: {sample.reason}")

    def _refuse_too_many(self) -> None:
        if self._has_refused:  # after the first error, the final save must not fail
            return
        known = len(self.known())
        met = known - sum(met < self._epoch for met in self._found.values())
        total = self._source.num_samples
        for bad, samples, place in ((met, self._epoch_samples, "this epoch"), (known, total, "the data set")):
            if bad > self._max_fraction * samples:
                self._has_refused = True
                raise self.error(
                    f"{bad:,} bad samples in {place} of {samples:,}, more than the allowed {self._max_fraction:.1%} "
                    "(--max-bad-fraction)"
                )
