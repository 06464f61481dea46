"""The specification of a data set, for training, validation and the tools that inspect a run."""

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from openclip_ext.cli.options import check_config, cli_field, from_flags
from openclip_ext.data.shards.shardlist import shards_in
from openclip_ext.data.sources.keys import DATA_FORMATS, DEFAULT_CAPTION_KEY, DEFAULT_IMAGE_KEY
from openclip_ext.data.storage import Storage

# The loaders of the library ``datasets``, by the ending of the file.
TABLE_LOADERS = {"parquet": "parquet", "jsonl": "json", "json": "json"}
# Of the images in class folders.
IMAGE_FILE_ENDINGS = (".webp", ".png", ".jpg", ".jpeg", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm")
_PARTS = {"train", "training", "val", "valid", "validation", "dev", "test", "testing"}


@dataclass(frozen=True)
class DataSpec:
    """A data set and the size of its epochs."""

    # Shards (see shardlist.expand_components) or a CSV file (--train-data, --val-data). None for synthetic data. Objects such
    # as pathlib.Path are accepted and become strings.
    source: str | Sequence[str] | None = cli_field(None, dest="train_data")
    # "auto" decides by the ending of the path.
    dataset_type: str = cli_field("auto", choices=("webdataset", "csv", "synthetic", "auto"))
    # Samples per epoch (--train-num-samples). None means all, or 100 for synthetic data.
    num_samples: int | None = cli_field(None, dest="train_num_samples", minimum=1)
    image_key: str = cli_field(DEFAULT_IMAGE_KEY, "extensions of the images in the shards")
    caption_key: str = cli_field(
        DEFAULT_CAPTION_KEY, "extension of the captions, or json:ENTRY for an entry of the json files"
    )
    caption_weights: tuple[float, ...] = cli_field(
        (),
        "draw among the parts of --caption-key with these weights; missing weights are 0, for captions that only replace "
        "missing ones",
        dest="json_text_key_probs",
    )
    hard_negative_key: str | None = cli_field(
        None,
        "like --caption-key (in tables and CSV files: a column), for captions that do not fit the image: additional negatives "
        "of the images",
    )
    csv_separator: str = cli_field("\t")
    # Columns of a table. None means OpenCLIP's (``filepath`` and ``title``) in a CSV file, or else the only suitable column.
    csv_image_key: str | None = cli_field(None, dest="csv_img_key")
    csv_caption_key: str | None = cli_field(None)
    caption_template: str = cli_field(
        "a photo of a {}", "caption of the images in a class folder; {} is the folder's name"
    )
    manifest: str | os.PathLike[str] | None = cli_field(
        None, "manifest of the training shards; it may exclude samples (default: found next to them, or created)"
    )
    resampled: bool = cli_field(False, dest="dataset_resampled")  # whether shards are sampled with replacement
    # Relative weights of the ``::`` components of ``source`` when shards are sampled: "1::2", or a list.
    upsampling_factors: str | Sequence[float] | None = cli_field(
        None, dest="train_data_upsampling_factors", needs="dataset_resampled"
    )
    single_source: bool = cli_field(
        False, "take all samples of a step from the same '::' source of --train-data", dest="single_source_batches"
    )
    # Embeddings of the reference model, for losses with ``--steer`` or ``--distill``.
    reference: str | os.PathLike[str] | None = cli_field(
        None,
        "folder with a reference model's embeddings of the training data, from openclip-ext embed; start: embed them first, "
        "with the pretrained model",
    )
    max_bad_fraction: float = cli_field(
        0.05, "stop when more than this fraction of the data set is unusable", minimum=0.0, maximum=1.0
    )
    max_image_pixels: int | None = cli_field(
        None, "a sample is bad if its image has more pixels (default: Pillow's limit, 178,956,970)", minimum=1
    )
    remote_patience: float = cli_field(
        300.0, "seconds for which an unreadable shard is retried before its samples count as bad", minimum=0.0
    )
    cache_dir: str | None = cli_field(None, "folder that keeps copies of remote shards for all processes of the node")
    cache_size: float = cli_field(
        100.0,
        "maximum size of --cache-dir in GiB; the least recently used shards are removed",
        needs="cache_dir",
        exclusive_minimum=0.0,
    )

    def __post_init__(self) -> None:
        check_config(self)
        if "{}" not in self.caption_template:  # all captions of class folders would be equal
            raise ValueError(f"--caption-template {self.caption_template!r}: expected {{}} for the name of the class")
        if isinstance(self.source, os.PathLike):
            object.__setattr__(self, "source", os.fspath(self.source))
        elif self.source is not None and not isinstance(self.source, str):
            object.__setattr__(self, "source", [os.fspath(path) for path in self.source])

    @classmethod
    def of_validation(cls, flags: Mapping[str, Any]) -> "DataSpec":
        """Return the validation data that flags specify. For the training data, call ``from_flags(DataSpec, flags)``."""
        # Loaders of validation data read no other field for training data. The exception is the number of synthetic samples,
        # which OpenCLIP also applies to both.
        return from_flags(cls, flags, source=flags["val_data"], reference=None, hard_negative_key=None)

    @property
    def storage(self) -> Storage:
        """The storage that opens the files of the data set."""
        return Storage(self.remote_patience, self.cache_dir, self.cache_size)

    @property
    def keys(self) -> dict[str, str]:
        """``image_key`` and ``caption_key`` of shards. CSV files and tables have none: their digests cover the columns."""
        if self.resolved_type in ("csv", "table"):
            return {}
        return {"image_key": self.image_key, "caption_key": self.caption_key}

    def check_type(self) -> None:
        """Raise ValueError for options that this data set does not support."""
        needs_shards = {
            "a source joined by '::'": "::" in str(self.source) and not os.path.exists(str(self.source)),
            "--dataset-resampled": self.resampled,
            "--single-source-batches": self.single_source,
            "--json-text-key-probs": bool(self.caption_weights),
        }
        kind = self.resolved_type
        for name in (name for name, is_used in needs_shards.items() if is_used and kind != "webdataset"):
            raise ValueError(f"{name} needs webdataset shards, not {kind}")
        if self.hard_negative_key is not None and kind == "synthetic":
            raise ValueError("--hard-negative-key needs captions, but --dataset-type synthetic has none: remove one")

    @property
    def resolved_type(self) -> str:
        """``webdataset``, ``csv``, ``table`` or ``synthetic``. For ``auto``, the path decides. Raise ValueError if unknown."""
        if self.dataset_type == "synthetic":
            return self.dataset_type
        if not self.source:
            raise ValueError("no data given: expected shards such as 'data/{00000..00099}.tar', or a table")
        text = self.source if isinstance(self.source, str) else self.source[0]
        if self.dataset_type != "auto" and not os.path.isdir(text):
            return self.dataset_type
        if is_table(text):
            return "table"
        ending = text.rstrip(" -\"'").rpartition(".")[2]
        if ending in ("csv", "tsv"):
            return "csv"
        if ".tar" in text or text.endswith(".tgz") or shards_in(text.partition("::")[0]):
            return "webdataset"
        what = " is a folder without class folders" if os.path.isdir(text) else ""
        if not os.path.exists(text):
            what = " is not a local file or folder"
        raise ValueError(
            f"{text}{what}: {DATA_FORMATS} (--dataset-type csv if it has another ending). Names of data sets on a hub are "
            "not read"
        )


def is_table(path: str) -> bool:
    """Return whether a path is a table: a Parquet or JSON-lines file, or a folder that is no folder of shards."""
    if os.path.isdir(path):
        return is_saved(path) or (not shards_in(path) and bool(class_folders(path)))
    return path.rpartition(".")[2] in TABLE_LOADERS


def is_saved(folder: str) -> bool:
    """Return whether ``datasets`` has saved a data set in the folder (``save_to_disk``)."""
    return any(os.path.isfile(os.path.join(folder, name)) for name in ("dataset_info.json", "dataset_dict.json"))


def class_folders(folder: str) -> list[str]:
    """Return the names of the subfolders in alphabetical order, without hidden ones.

    Raises:
        ValueError: The subfolders are parts of a data set (``train``, ``val``) and not classes.
    """
    with os.scandir(folder) as entries:
        names = sorted(entry.name for entry in entries if entry.is_dir() and not entry.name.startswith("."))
    if names and {name.lower() for name in names} <= _PARTS:
        parts = ", ".join(os.path.join(folder, name) for name in names)
        raise ValueError(f"{folder} has parts of a data set, and not classes: give one of them, {parts}")
    return names


def files_below(folder: str) -> Iterator[str]:
    """Yield the paths of the files at any depth below a folder, also through links, sorted and without hidden ones."""
    for place, folders, files in os.walk(folder, followlinks=True):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        yield from (os.path.join(place, name) for name in sorted(files) if not name.startswith("."))


def images_below(folder: str) -> Iterator[str]:
    """Yield the paths of the images among :func:`files_below`."""
    return filter(is_image_file, files_below(folder))


def is_image_file(path: str) -> bool:
    """Return whether the path of a file ends like that of an image."""
    return path.lower().endswith(IMAGE_FILE_ENDINGS)
