"""The configuration of the training loader. This module does not import torch."""

from dataclasses import dataclass, replace

from openclip_ext.cli.options import check_config, cli_field
from openclip_ext.data.sources.spec import DataSpec


@dataclass(frozen=True)
class TrainLoaderConfig:
    """Batches, workers, order and augmentation of a :class:`TrainLoader`."""

    batch_size: int = cli_field(minimum=1)  # samples of a micro-batch on one rank
    accum_freq: int = cli_field(1, minimum=1)  # micro-batches of an optimizer step
    workers: int = cli_field(0, minimum=0, maximum=1024)  # per rank; 0 means loading in the training process
    seed: int = cli_field(0, minimum=0, maximum=2**32 - 1)  # seed of the sample order and the augmentation
    rank: int | None = None  # for rank and world_size, None means the value of torch.distributed
    world_size: int | None = None
    shuffle_window: int = 10_000  # samples among which a worker shuffles; about half of them are in memory
    # Augmented views per image. If > 1, ``image`` is (batch_size, views, ...), and the text belongs to the first view.
    views: int = 1
    caption_aware_flip: bool = cli_field(
        False, "mirror half of the images, and exchange 'left' and 'right' in their captions"
    )
    draw_captions: bool = cli_field(
        False,
        "in each epoch, use a random caption of each sample, from all fields of --caption-key and from lists in json",
    )
    draw_sentences: bool = cli_field(
        False, "in each epoch, use a random sentence of each caption, also of one that --draw-captions selects"
    )
    # Adds ``caption_hash`` and ``image_hash`` to batches, which are equal for equal captions and for equal image files.
    caption_hash: bool = False
    hashed_steps: int = 0  # number of optimizer steps of the first epoch whose batches always have the two hashes
    text_groups: int = 0  # if > 0, adds ``text_groups``: the texts in up to this many groups of similar length
    equal_text_groups: bool = False  # whether the groups have equal sizes, for a compiled model
    pin_memory: bool = False
    patience: float | None = None  # seconds to wait for a worker before it is killed; None means no timeout

    def __post_init__(self) -> None:
        check_config(self)


@dataclass(frozen=True)
class KeepConfig:
    """Rehearsal: a part of each batch comes from general pairs, so that the model keeps its general abilities."""

    # In the formats of --train-data. None means no rehearsal.
    source: str | None = cli_field(
        None,
        "general pairs to rehearse, in a format of --train-data; some are held out to score what the model keeps",
        dest="keep_data",
        needs="train_data",
    )
    share: float = cli_field(
        0.25,
        "share of each batch that comes from --keep-data",
        dest="keep_share",
        needs="keep_data",
        exclusive_minimum=0.0,
        exclusive_maximum=1.0,
    )

    def spec(self, own: DataSpec) -> DataSpec:
        """Return the specification of the pairs to rehearse. It names the same fields as the training data ``own``."""
        return replace(
            own,
            source=self.source,
            dataset_type="auto",
            num_samples=None,
            manifest=None,
            resampled=False,
            upsampling_factors=None,
            single_source=False,
            reference=None,
        )

    def shared(self, batch_size: int) -> tuple[int, int]:
        """Return how many samples of a batch come from the training data, and how many are rehearsed: both at least one.

        Raises:
            ValueError: The batch has one sample.
        """
        if batch_size < 2:
            raise ValueError(f"--keep-data: expected a --batch-size of at least 2, found {batch_size}")
        rehearsed = min(max(round(self.share * batch_size), 1), batch_size - 1)
        return batch_size - rehearsed, rehearsed
