"""Rehearsal: a part of each batch comes from general pairs (``--keep-data``), some of which are held out for a score."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from openclip_ext import compat, distributed
from openclip_ext.cli.messages import get_logger
from openclip_ext.data.hashing import Purpose, hash64
from openclip_ext.data.loader.build import build_other_source, build_train_loader
from openclip_ext.data.loader.config import KeepConfig, TrainLoaderConfig
from openclip_ext.data.loader.train_loader import Interruptible, Tokenizer, TrainLoader, Transform
from openclip_ext.data.order import EpochSequence
from openclip_ext.data.reference import REFERENCE_KEYS
from openclip_ext.data.sources.source import DecodedImage, ImageDecoder, RawSample, Source, decode_image
from openclip_ext.data.sources.spec import DataSpec
from openclip_ext.data.text_groups import group_texts, texts_of

logger = get_logger(__name__)

# A tenth of the general pairs is held out, but at least and at most this many.
HELD_OUT_SHARE, FEWEST_HELD_OUT, MOST_HELD_OUT = 10, 100, 5000


class PartSource(Source):
    """A source without the samples ``excluded`` ``(k,)`` int64 (ascending). The other samples keep their indices."""

    def __init__(self, source: Source, excluded: np.ndarray) -> None:
        super().__init__(source.num_samples, f"{source.digest}:{len(excluded)}")
        self.index_digest = source.index_digest
        self.sequential, self.several_captions = source.sequential, source.several_captions
        self.num_kept = source.num_kept - len(excluded)
        self._source, self._excluded = source, excluded
        self._is_excluded = np.zeros(source.num_samples, dtype=bool)
        self._is_excluded[excluded] = True

    def is_left_out(self, index: int) -> bool:
        return bool(self._is_excluded[index]) or self._source.is_left_out(index)

    def sequence(self, seed: int, epoch: int, num_slots: int, bad: np.ndarray) -> tuple[EpochSequence, int | None]:
        return self._source.sequence(seed, epoch, num_slots, np.union1d(self._excluded, bad))

    def read(self, indices: Iterable[np.ndarray]) -> Iterator[RawSample]:
        return self._source.read(indices)

    def decode(self, raw: RawSample, decoder: ImageDecoder, draw: int = 0) -> tuple[DecodedImage, str]:
        return self._source.decode(raw, decoder, draw)

    def group_of(self, index: int) -> tuple[str, int, int]:
        return self._source.group_of(index)

    def describe(self, raw: RawSample) -> tuple[str, str]:
        return self._source.describe(raw)

    def known_bad(self) -> tuple[int, str]:
        return self._source.known_bad()


def split(source: Source) -> tuple[PartSource, PartSource]:
    """Return the samples to rehearse and the held-out samples, which only depend on the indices of the data set.

    A tenth is held out, but at least 100 and at most 5,000 samples: those whose indices have the smallest hashes.

    Raises:
        ValueError: There are fewer than 200 samples.
    """
    kept = np.arange(source.num_samples)
    if source.num_kept < source.num_samples:
        kept = np.array([index for index in kept.tolist() if not source.is_left_out(index)], dtype=np.int64)
    if len(kept) < 2 * FEWEST_HELD_OUT:
        raise ValueError(f"--keep-data: expected at least {2 * FEWEST_HELD_OUT} pairs, found {len(kept)}. Add pairs")
    number = min(max(len(kept) // HELD_OUT_SHARE, FEWEST_HELD_OUT), MOST_HELD_OUT)
    order = kept[np.argsort(hash64(Purpose.HELD_OUT, kept), kind="stable")]
    held_out, rehearsed = np.sort(order[:number]), np.sort(order[number:])
    return PartSource(source, held_out), PartSource(source, rehearsed)


class RehearsalLoader:
    """Training batches whose last samples come from general pairs, so that these are negatives of the first, and vice versa.

    The length of an epoch is that of ``own``. The general pairs have epochs of their own, which continue across the epochs
    of ``own``: a small set repeats, a large set is read over the whole run. General pair ``j`` has the index
    ``own.num_samples + j``.

    Args:
        own: The loader of the training data.
        keep: The loader of the pairs to rehearse, with the same ranks and accumulation.
        held_out: The general pairs that are not rehearsed.
        config: The settings of the joined batches.
    """

    def __init__(self, own: TrainLoader, keep: TrainLoader, held_out: Source, config: TrainLoaderConfig) -> None:
        self.source, self.held_out = own.source, held_out
        self._own, self._keep, self._config = own, keep, config
        self._keep_epoch = 0
        self._kept_batches: Iterator[dict[str, Any]] | None = None
        # Of the current epoch. A list, because with a reference from the iterator to this loader, its workers would end late.
        self._interruptible: list[Interruptible] = [nullcontext]

    @property
    def num_samples(self) -> int:
        """Number of samples of both data sets, including excluded and held-out samples."""
        return self._own.num_samples + self._keep.num_samples

    @property
    def index_digest(self) -> str | None:
        """Hash of the samples and their indices, see :class:`Source`. None if unknown."""
        digests = self.source.index_digest, self._keep.source.index_digest
        return None if None in digests else "+".join(map(str, digests))

    @property
    def batches_per_epoch(self) -> int:
        """Number of micro-batches of each rank in a full epoch of the training data."""
        return self._own.batches_per_epoch

    def bad_counts(self) -> tuple[int, int]:
        """Return the sums of both loaders' :meth:`TrainLoader.bad_counts`."""
        (own, own_new), (kept, kept_new) = self._own.bad_counts(), self._keep.bad_counts()
        return own + kept, own_new + kept_new

    def state_dict(self) -> dict[str, Any]:
        """Return the progress in both data sets, in plain types. Collective: all ranks call it."""
        return {"own": self._own.state_dict(), "keep": self._keep.state_dict(), "keep_epoch": self._keep_epoch}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore a :meth:`state_dict`. For errors, see :meth:`TrainLoader.load_state_dict`."""
        if "keep" not in state_dict:
            raise ValueError(
                "the checkpoint was made without --keep-data: remove the flag, or start a run with another --name"
            )
        try:
            self._own.load_state_dict(state_dict["own"])
            self._keep.load_state_dict(state_dict["keep"])
        except ValueError as error:
            # The error has the batch size of a part. Between two epochs of the training data, the general pairs are mid-epoch.
            raise ValueError(
                "with --keep-data, a run resumes only with the checkpoint's data, --seed, global batch and --keep-share. Use "
                "these, or give --pretrained CHECKPOINT and another --name"
            ) from error
        self._keep_epoch, self._kept_batches = state_dict["keep_epoch"], None

    def iterate(self, epoch: int, interruptible: Interruptible = nullcontext) -> Iterator[dict[str, Tensor]]:
        """Yield an epoch of the training data, or its rest after :meth:`load_state_dict`. See :meth:`TrainLoader.iterate`."""
        self._interruptible[:] = [interruptible]
        for batch in self._own.iterate(epoch, interruptible):
            try:
                kept = self._next_kept()
            except BaseException:  # also a signal: nothing trains on the batch, so a checkpoint must not count it
                self._own.undo_step()
                raise
            yield self._joined(batch, kept)

    def _next_kept(self) -> dict[str, Any]:
        """Return the next batch of general pairs. After the last batch of their epoch, start their next epoch."""
        current = self._interruptible
        while True:
            if self._kept_batches is None:
                self._kept_batches = self._keep.iterate(self._keep_epoch, lambda: current[0]())
            if (batch := next(self._kept_batches, None)) is not None:
                return batch
            self._keep_epoch, self._kept_batches = self._keep_epoch + 1, None

    def _joined(self, own: dict[str, Any], kept: dict[str, Any]) -> dict[str, Any]:
        kept |= {"index": kept["index"] + self._own.num_samples}
        # General pairs have no reference embeddings. Losses mask rows of zeros.
        rows = len(kept["index"])
        kept |= {name: own[name].new_zeros(rows, own[name].shape[1]) for name in REFERENCE_KEYS if name in own}
        # Only the first batches of each loader's first epoch have both hashes.
        batch: dict[str, Any] = {
            name: self._concatenated(value, kept[name]) for name, value in own.items() if name in kept
        }
        if self._config.text_groups > 0:
            most, of_equal_size = self._config.text_groups, self._config.equal_text_groups
            groups = group_texts(texts_of(batch), most, of_equal_size)
            pins = self._config.pin_memory
            batch["text_groups"] = compat.map_tensors(Tensor.pin_memory, groups) if pins else groups
        return batch

    def _concatenated(self, own: Tensor, kept: Tensor) -> Tensor:
        if not self._config.pin_memory:
            return torch.cat([own, kept])
        both = own.new_empty(len(own) + len(kept), *own.shape[1:], pin_memory=True)
        return torch.cat([own, kept], out=both)


def build_rehearsal_loader(
    spec: DataSpec,
    config: TrainLoaderConfig,
    keep: KeepConfig,
    *,
    preprocess: Transform,
    tokenizer: Tokenizer,
    decoder: ImageDecoder = decode_image,
    source: Source | None = None,
) -> RehearsalLoader:
    """Build the loader of a ``source``, by default the source of ``spec``, with rehearsal of the pairs of ``keep``.

    Collective: all ranks call it. For errors, see :class:`TrainLoader`.
    """
    assert keep.source is not None, "without it, there is nothing to rehearse"
    transforms: dict[str, Any] = {"preprocess": preprocess, "tokenizer": tokenizer, "decoder": decoder}
    num_own, num_kept = keep.shared(config.batch_size)
    # The joined batches are pinned and their texts are grouped.
    part = replace(config, text_groups=0, pin_memory=False)
    kept_workers = min(config.workers, max(1, round(config.workers * num_kept / config.batch_size)))
    own_workers = min(config.workers, max(1, config.workers - kept_workers))
    own = build_train_loader(spec, replace(part, batch_size=num_own, workers=own_workers), source=source, **transforms)
    assert isinstance(own, TrainLoader), "--single-source-batches is refused"
    rehearsed, held_out = split(build_other_source(keep.spec(spec)))
    part = replace(part, batch_size=num_kept, workers=kept_workers)
    part = replace(part, draw_captions=config.draw_captions and rehearsed.several_captions)
    try:
        kept = TrainLoader(rehearsed, part, max_bad_fraction=spec.max_bad_fraction, **transforms)
    except ValueError as error:
        raise ValueError(f"--keep-data: {error}") from None
    if distributed.is_rank0():
        logger.info(
            f"Keep data: {num_kept} of the {config.batch_size} samples of a batch come from {rehearsed.num_kept:,} pairs; "
            f"{held_out.num_kept:,} other pairs are held out to score what the model keeps."
        )
    return RehearsalLoader(own, kept, held_out, config)
