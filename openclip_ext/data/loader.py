"""From what stands on the command line to loaders."""

import logging
import os
from collections.abc import Sequence
from typing import Any

from openclip_ext.data import evaluation
from openclip_ext.data.evaluation import EvalLoader
from openclip_ext.data.flip import flip_at_random
from openclip_ext.data.indexed import DEFAULT_SHUFFLE_WINDOW, IndexedLoader, Tokenizer, Transform
from openclip_ext.data.manifest import find_or_create_manifest
from openclip_ext.data.scan import DEFAULT_CAPTION_KEY, DEFAULT_IMAGE_KEY
from openclip_ext.data.shardlist import expand_components, expand_shards
from openclip_ext.data.shards import ShardSource
from openclip_ext.data.source import Source


def resolve_dataset_type(data: str | Sequence[str] | None, dataset_type: str) -> str:
    """OpenCLIP's ``--dataset-type``: ``auto`` goes by the ending of the path.

    Raises:
        ValueError: The type is unknown, the ending says nothing, or there is no path where one is needed.
    """
    if dataset_type not in ("webdataset", "csv", "synthetic", "auto"):
        raise ValueError(f"unknown dataset type {dataset_type!r}: expected webdataset, csv, synthetic or auto")
    if dataset_type == "synthetic":
        return dataset_type
    if not data:
        raise ValueError("no data given: expected shards such as 'data/{00000..00099}.tar' or a CSV file")
    if dataset_type != "auto":
        return dataset_type
    text = data if isinstance(data, str) else data[0]
    ending = text.rstrip(" -\"'").rpartition(".")[2]
    if ending in ("csv", "tsv"):
        return "csv"
    if ending in ("tar", "tgz") or ".tar" in text:
        return "webdataset"
    raise ValueError(f"cannot tell the dataset type of {text!r} from its ending: say it with --dataset-type")


def build_train_loader(
    train_data: str | Sequence[str] | None,
    *,
    preprocess: Transform,
    tokenizer: Tokenizer,
    batch_size: int,
    dataset_type: str = "auto",
    workers: int = 0,
    accum_freq: int = 1,
    seed: int = 0,
    rank: int | None = None,
    world_size: int | None = None,
    epoch_samples: int | None = None,
    manifest: str | os.PathLike | None = None,
    manifest_fallback: str | os.PathLike | None = None,
    image_key: str = DEFAULT_IMAGE_KEY,
    caption_key: str = DEFAULT_CAPTION_KEY,
    csv_separator: str = "\t",
    csv_image_key: str = "filepath",
    csv_caption_key: str = "title",
    resampled: bool = False,
    upsampling_factors: str | Sequence[float] | None = None,
    max_bad_fraction: float = 0.05,
    shuffle_window: int = DEFAULT_SHUFFLE_WINDOW,
    caption_aware_flip: bool = False,
    views: int = 1,
    pin_memory: bool = False,
    prefetch_factor: int = 2,
) -> IndexedLoader:
    """Build the training loader; with several processes, every rank calls this.

    Args:
        train_data: Shards (see :func:`openclip_ext.data.shardlist.expand_components`) or a CSV file; None if synthetic.
        preprocess: From an RGB image to a tensor, as ``open_clip.create_model_and_transforms`` returns it.
        tokenizer: From a caption to token ids of shape ``(1, L)``, as OpenCLIP's.
        epoch_samples: Samples of an epoch (``--train-num-samples``); None for all. A synthetic data set has as many
            (100 by default).
        manifest: Path of the manifest; None to find or make one.
        manifest_fallback: Where a new manifest is written if the shards' folder is read-only.
        resampled: Draw shards with replacement; ``upsampling_factors`` are OpenCLIP's: one for each component
            of ``train_data`` ("1::2").
        caption_aware_flip: Mirror half of the images, with 'left' and 'right' exchanged in their captions.
        batch_size, ...: See :class:`openclip_ext.data.indexed.IndexedLoader`.

    Raises:
        ValueError: Something is wrong with the arguments or the data; says what, and what to do.
        BadDataError: Too many samples are known to be bad.
    """
    kind = resolve_dataset_type(train_data, dataset_type)
    if (resampled or upsampling_factors is not None) and kind != "webdataset":
        raise ValueError(f"--dataset-resampled and --train-data-upsampling-factors need webdataset shards, not {kind}")
    source: Source
    if kind == "webdataset":
        found = find_or_create_manifest(train_data, manifest, image_key, caption_key, fallback_folder=manifest_fallback)
        weights = _shard_weights(train_data, upsampling_factors, resampled, [shard.url for shard in found.shards])
        source = ShardSource(found, image_key, caption_key, resampled, weights)
    elif kind == "csv":
        source = _csv_source(train_data, csv_image_key, csv_caption_key, csv_separator)
    else:
        source = _synthetic_source(preprocess, 100 if epoch_samples is None else epoch_samples)
    return IndexedLoader(
        source,
        preprocess,
        tokenizer,
        batch_size=batch_size,
        workers=workers,
        accum_freq=accum_freq,
        seed=seed,
        rank=rank,
        world_size=world_size,
        epoch_samples=epoch_samples if resampled else _at_most_all(epoch_samples, source),
        max_bad_fraction=max_bad_fraction,
        shuffle_window=shuffle_window,
        pair_transform=flip_at_random if caption_aware_flip else None,
        views=views,
        pin_memory=pin_memory,
        prefetch_factor=prefetch_factor,
    )


def build_eval_loader(
    data: str | Sequence[str] | None,
    *,
    preprocess: Transform,
    tokenizer: Tokenizer,
    batch_size: int,
    dataset_type: str = "auto",
    workers: int = 0,
    num_samples: int | None = None,
    image_key: str = DEFAULT_IMAGE_KEY,
    caption_key: str = DEFAULT_CAPTION_KEY,
    csv_separator: str = "\t",
    csv_image_key: str = "filepath",
    csv_caption_key: str = "title",
    pin_memory: bool = False,
) -> EvalLoader:
    """Build the loader of validation data, for one rank.

    Args:
        num_samples: For display; the data are read to their end (a synthetic set has so many).
        data, preprocess, ...: As in :func:`build_train_loader`.
    """
    kind = resolve_dataset_type(data, dataset_type)
    samples: Any
    if kind == "webdataset":
        samples = evaluation.shard_samples(expand_shards(data), image_key, caption_key)
    else:
        if kind == "csv":
            source = _csv_source(data, csv_image_key, csv_caption_key, csv_separator)
        else:
            source = _synthetic_source(preprocess, 100 if num_samples is None else num_samples)
        num_samples = source.num_samples
        samples = evaluation.source_samples(source)
    return EvalLoader(
        samples,
        preprocess,
        tokenizer,
        batch_size=batch_size,
        workers=workers,
        num_samples=num_samples,
        pin_memory=pin_memory,
    )


def build_indexed_pass(
    train_data: str | Sequence[str] | None,
    *,
    preprocess: Transform,
    tokenizer: Tokenizer,
    batch_size: int,
    dataset_type: str = "auto",
    workers: int = 0,
    num_samples: int | None = None,
    manifest: str | os.PathLike | None = None,
    image_key: str = DEFAULT_IMAGE_KEY,
    caption_key: str = DEFAULT_CAPTION_KEY,
    csv_separator: str = "\t",
    csv_image_key: str = "filepath",
    csv_caption_key: str = "title",
    pin_memory: bool = False,
) -> EvalLoader:
    """Build a loader that reads the training data once, in order, with the index each sample has in training.

    Its ``num_samples`` is the size of the index space; bad samples, which training replaces, are left out.

    Args:
        num_samples: Size of a synthetic data set; others have their own.
        train_data, preprocess, ...: As in :func:`build_train_loader`.
    """
    kind = resolve_dataset_type(train_data, dataset_type)
    source: Source
    if kind == "webdataset":
        source = ShardSource(
            find_or_create_manifest(train_data, manifest, image_key, caption_key), image_key, caption_key
        )
    elif kind == "csv":
        source = _csv_source(train_data, csv_image_key, csv_caption_key, csv_separator)
    else:
        source = _synthetic_source(preprocess, 100 if num_samples is None else num_samples)
    return EvalLoader(
        evaluation.source_samples(source),
        preprocess,
        tokenizer,
        batch_size=batch_size,
        workers=workers,
        num_samples=source.num_samples,
        pin_memory=pin_memory,
    )


def _at_most_all(epoch_samples: int | None, source: Source) -> int | None:
    """OpenCLIP's commands often name a round number of samples, or that of another download."""
    if epoch_samples is None or epoch_samples <= source.num_samples:
        return epoch_samples
    logging.warning(
        f"--train-num-samples {epoch_samples:,} is more than the {source.num_samples:,} samples of the data set: an "
        "epoch is the data set"
    )
    return source.num_samples


def _csv_source(data: str | Sequence[str], image_key: str, caption_key: str, separator: str) -> Source:
    # pandas takes half a second to import and only CSV files need it.
    from openclip_ext.data.csv import CsvSource

    if not isinstance(data, str):
        if len(data) != 1:
            raise ValueError(f"expected one CSV file, got {list(data)}")
        data = data[0]
    return CsvSource(data, image_key, caption_key, separator)


def _synthetic_source(preprocess: Any, num_samples: int) -> Source:
    from openclip_ext.data.synthetic import SyntheticSource

    # As OpenCLIP: as large as the crop that the transform begins with.
    size = getattr(getattr(preprocess, "transforms", [None])[0], "size", 224)
    return SyntheticSource(num_samples, (size, size) if isinstance(size, int) else (size[-1], size[-2]))


def _shard_weights(
    train_data: str | Sequence[str],
    factors: str | Sequence[float] | None,
    resampled: bool,
    urls: Sequence[str],
) -> list[float] | None:
    """Each shard's share in the draws."""
    if factors is None:
        return None
    if not resampled:
        raise ValueError("--train-data-upsampling-factors needs --dataset-resampled (sampling with replacement)")
    values = [float(value) for value in (factors.split("::") if isinstance(factors, str) else factors)]
    components = expand_components(train_data)
    if len(values) != len(components):
        raise ValueError(f"{len(values)} upsampling factors for {len(components)} data sources: give one for each")
    if min(values) < 0 or not sum(values):
        raise ValueError(f"upsampling factors must not be negative, nor all be 0, got {values}")
    by_url = {url: value for component, value in zip(components, values, strict=True) for url in component}
    return [by_url[url] for url in urls]
