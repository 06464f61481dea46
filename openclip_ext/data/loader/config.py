"""The configuration of the training loader. This module does not import torch."""

from dataclasses import dataclass

from openclip_ext.cli.options import check_config, flag


@dataclass(frozen=True)
class TrainLoaderConfig:
    """Batches, workers, order and augmentation of a :class:`TrainLoader`."""

    batch_size: int = flag(minimum=1)  # samples of a micro-batch on one rank
    accum_freq: int = flag(1, minimum=1)  # micro-batches of an optimizer step
    workers: int = flag(0, minimum=0, maximum=1024)  # per rank; 0 means loading in the training process
    seed: int = flag(0, minimum=0, maximum=2**32 - 1)  # seed of the sample order and the augmentation
    rank: int | None = None  # for rank and world_size, None means the value of torch.distributed
    world_size: int | None = None
    shuffle_window: int = 10_000  # samples among which a worker shuffles; about half of them are in memory
    # Augmented views per image. If > 1, ``image`` is (batch_size, views, ...), and the text belongs to the first view.
    views: int = 1
    caption_aware_flip: bool = flag(
        False, "mirror half of the images, and exchange 'left' and 'right' in their captions"
    )
    draw_captions: bool = flag(
        False,
        "in each epoch, use a random caption of each sample, from all fields of --caption-key and from lists in json",
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
