"""Training batches with indices: exact order, exact resuming, pixels that depend on (seed, epoch, index) alone.

:mod:`openclip_ext.data.order` has the order, and the sources read. :mod:`.batches` is what workers do, :mod:`.epoch_pass` one
pass over an epoch.
"""

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from openclip_ext import distributed
from openclip_ext.data.loader.bad_samples import BadSamples
from openclip_ext.data.loader.batches import BatchDataset, BatchRequests, Beginning, Tokenizer, Transform
from openclip_ext.data.loader.config import TrainLoaderConfig
from openclip_ext.data.loader.epoch_pass import EpochData, EpochPass, Progress
from openclip_ext.data.loader.workers import kill_workers, leave_process_group, watched_batches
from openclip_ext.data.order import Layout, Segment
from openclip_ext.data.sources.source import MAX_CAPTION, BadDataError, ImageDecoder, Source, decode_image


class _Opener:
    """Opens the batches of a rank's workers; it refers to no loader: a cycle would close queues before it ends the workers."""

    def __init__(self, loader: DataLoader[Any], requests: BatchRequests, patience: float | None) -> None:
        self._loader, self._requests, self._patience = loader, requests, patience

    def __call__(
        self, epoch: int, seen: tuple[Segment, ...], numbers: range, beginning: Beginning
    ) -> Iterator[dict[str, Any]]:
        requests = self._requests
        requests.epoch, requests.seen, requests.batches, requests.beginning = epoch, seen, numbers, beginning
        return watched_batches(self._loader, self._patience)


class TrainLoader:
    """Training batches with global indices.

    On every rank, an epoch has ``batches_per_epoch`` batches of ``batch_size`` samples. Every sample comes once over all
    ranks, except for a remainder that does not fill a global batch (``batch_size * world_size * accum_freq``). Bad samples
    are passed over; if they leave too few, the epoch has fewer batches. Later epochs leave out the bad samples of all ranks,
    but try those again that could not be read.

    Args:
        source: The samples.
        config: How to batch them.
        preprocess: Makes a tensor of an RGB image. It may draw from the generators of torch, numpy and random, which are
            seeded by (seed, epoch, index) before each call.
        decoder: Makes what ``preprocess`` takes of the content of an image file; see :mod:`openclip_ext.data.images`.
        tokenizer: Makes token ids ``(1, L)`` of a caption, as OpenCLIP's.
        epoch_samples: Length of a shorter epoch, which has another part of the data each time. No index changes.
        max_bad_fraction: The run stops when more of the samples than this are bad.

    Raises:
        ValueError: There are too few samples for one global batch, or an argument is out of range.
        BadDataError: More samples than ``max_bad_fraction`` are known to be bad.
    """

    def __init__(
        self,
        source: Source,
        config: TrainLoaderConfig,
        *,
        preprocess: Transform,
        tokenizer: Tokenizer,
        decoder: ImageDecoder = decode_image,
        epoch_samples: int | None = None,
        max_bad_fraction: float = 0.05,
    ) -> None:
        self.source = source
        self.seed = config.seed
        self.rank = distributed.rank() if config.rank is None else config.rank
        self.max_bad_fraction = max_bad_fraction
        self._draws_captions = config.draw_captions
        self._layout = Layout(
            world_size=distributed.world_size() if config.world_size is None else config.world_size,
            workers=max(1, config.workers),
            batch_size=config.batch_size,
            accum_freq=config.accum_freq,
            epoch_samples=source.num_kept if epoch_samples is None else epoch_samples,
            shuffle_window=config.shuffle_window if source.sequential else 0,
        )
        self._check_arguments()
        self.bad = BadSamples(source, max_bad_fraction, self._layout.epoch_samples)
        self._num_cut = 0
        self._interruptible: Callable[[], AbstractContextManager[Any]] = nullcontext
        requests = BatchRequests(self._layout.workers)
        max_bad = int(max_bad_fraction * self._layout.epoch_samples)
        self._loader: DataLoader[Any] = DataLoader(
            BatchDataset(source, config, decoder, preprocess, tokenizer, self._layout, self.rank, max_bad),
            batch_size=None,
            sampler=requests,
            num_workers=config.workers,
            worker_init_fn=leave_process_group,
            pin_memory=config.pin_memory,
            persistent_workers=config.workers > 0,
            # DataLoader would draw from the training process's generator at the start of every pass.
            generator=torch.Generator().manual_seed(config.seed & 0x7FFFFFFF),
        )
        opener = _Opener(self._loader, requests, config.patience)
        self._data = EpochData(source, config.seed, self._layout, self.rank, self.bad, opener)
        self._pass, self._is_under_way = EpochPass(self._data, 0, []), False
        self._loaded: Progress = ()

    def _check_arguments(self) -> None:
        layout, source = self._layout, self.source
        if min(layout.batch_size, layout.accum_freq, layout.world_size, layout.epoch_samples) < 1:
            raise ValueError(f"batch size, accumulation, ranks and samples must be at least 1, got {layout}")
        if not layout.batches(layout.epoch_samples):
            raise ValueError(
                f"too few samples: the epoch has {layout.epoch_samples:,}, one global batch is batch size "
                f"{layout.batch_size} x {layout.world_size} ranks x {layout.accum_freq} accumulated = "
                f"{layout.global_batch:,}. Lower the batch size or use fewer ranks"
            )
        if self._draws_captions and not source.several_captions:
            raise ValueError("--draw-captions is for shards: other data sets have one caption for each image")
        bad, where = source.known_bad()
        if bad > self.max_bad_fraction * source.num_samples:
            raise BadDataError(
                f"{bad:,} of {source.num_samples:,} samples ({bad / source.num_samples:.1%}) are lost or have no image "
                f"or no caption, more than the allowed {self.max_bad_fraction:.1%} (--max-bad-fraction): {where}"
            )

    @property
    def num_samples(self) -> int:
        """Size ``n`` of the index space."""
        return self.source.num_samples

    @property
    def batches_per_epoch(self) -> int:
        """Micro-batches of each rank in a whole epoch."""
        return self._layout.batches(self._layout.epoch_samples)

    @property
    def layout(self) -> dict[str, Any]:
        """The current layout as a progress entry without ``batches``, in plain types."""
        return asdict(self._layout) | {"seed": self.seed, "data": self.source.digest}

    def progress(self) -> list[dict[str, Any]]:
        """Return the progress in the epoch after the batches that :meth:`iterate` has handed out. All ranks must call it.

        It also tells the ranks each other's bad samples.
        """
        self.bad.exchange()
        return self._pass.progress()

    def state_dict(self) -> dict[str, Any]:
        """Return what a resume needs, as plain types: progress in the epoch and bad samples. All ranks must call it."""
        return {"progress": self.progress() if self._is_under_way else [], "bad": self.bad.state_dict()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore :meth:`state_dict`; the next :meth:`iterate` goes on there.

        Raises:
            ValueError: The state is in an epoch of another data set or seed.
        """
        self.bad.load_state_dict(state_dict.get("bad", {}))
        self._loaded = state_dict.get("progress", ())
        self.check_progress(self._loaded)

    @contextmanager
    def interrupted_by(self, interruptible: Callable[[], AbstractContextManager[Any]]) -> Iterator[None]:
        """Wait for batches inside of a context in which a signal handler may raise :class:`Interrupted`.

        If the block ends with an exception, the workers are killed: the process would wait for one that hangs.
        """
        self._interruptible = interruptible
        try:
            yield
        except BaseException:
            kill_workers(self._loader)
            raise
        finally:
            self._interruptible = nullcontext

    def check_progress(self, progress: Progress | None) -> tuple[tuple[Segment, ...], int]:
        """Return the segments in other layouts, and how many batches of the current one are done.

        Raises:
            ValueError: The progress is of another data set or seed.
        """
        return self._data.segments(progress or ())

    def iterate(self, epoch: int, progress: Progress | None = None) -> Iterator[dict[str, Tensor]]:
        """Yield the rest of an epoch.

        If bad samples leave a worker with too few for its last batch, the samples that are left on all ranks are laid out
        anew, as long as they fill a step.

        Args:
            epoch: Number of the epoch, from 0.
            progress: The part that was seen, from :meth:`progress`: entries ``loader.layout | {"batches": those of each rank,
                "bad": ...}``. If the last layout is the current one, the same batches follow; otherwise the unseen
                samples are laid out anew. None: what :meth:`load_state_dict` was given, or nothing.

        Yields:
            ``image`` ``(batch_size, ...)``, ``text`` ``(batch_size, L)`` int64, ``index`` ``(batch_size,)`` int64,
            and where configured ``caption_hash`` ``(batch_size,)`` int64.

        Raises:
            ValueError: The progress is not of this data set and seed, or has more batches than the epoch.
            BadDataError: Too many samples are bad. The ranks add up theirs now and then, so they must iterate side by side.
            WorkerError: A worker of some rank exited or did not answer; all ranks raise it before the same step.
            Interrupted: a signal came while some rank waited, see :meth:`interrupted_by`; all ranks raise it before the same
                step.
        """
        progress, self._loaded = (self._loaded if progress is None else progress), ()
        self._pass = EpochPass(self._data, epoch, [dict(entry) for entry in progress], self._interruptible)
        self._is_under_way = True
        yield from self._pass
        self._is_under_way = False
        self._num_cut += self._pass.num_cut
        self.bad.log_epoch()
        if self._num_cut:
            logging.warning(
                f"Rank {self.rank} has cut {self._num_cut:,} captions to their first {MAX_CAPTION:,} characters so far."
            )
