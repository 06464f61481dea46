"""Build loaders from a :class:`~openclip_ext.data.sources.spec.DataSpec`."""

import contextlib
import itertools
import math
import os
import platform
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from openclip_ext import distributed
from openclip_ext.cli.messages import get_logger
from openclip_ext.data.loader.config import KeepConfig, TrainLoaderConfig
from openclip_ext.data.loader.train_loader import Tokenizer, TrainLoader, Transform
from openclip_ext.data.manifest.find import find_or_create_manifest
from openclip_ext.data.reference import START, EmbeddingStore
from openclip_ext.data.shards.shard_source import SHARDS_IN_USE, ShardSource
from openclip_ext.data.shards.shardlist import expand_components, expand_shards
from openclip_ext.data.sources.rows import RowSource
from openclip_ext.data.sources.source import (
    BadDataError,
    BadSampleError,
    ImageDecoder,
    SampleKeys,
    Source,
    decode_image,
    no_image,
)
from openclip_ext.data.sources.spec import DataSpec

if TYPE_CHECKING:
    from openclip_ext.data.loader.eval_loader import EvalLoader, ShardStreams
    from openclip_ext.data.loader.rehearsal import RehearsalLoader
    from openclip_ext.data.loader.single_source import AnyTrainLoader

logger = get_logger(__name__)
T = TypeVar("T")

# At least one of this many first samples of validation shards or of a table must have an image and a caption.
_FIRST_SAMPLES = 100
_SYNTHETIC_SAMPLES = 100  # OpenCLIP's default


def build_loader(
    spec: DataSpec, config: TrainLoaderConfig, keep: KeepConfig, **parts: Any
) -> "AnyTrainLoader | RehearsalLoader":
    """Build the training loader, with rehearsal if ``keep`` has a source. For ``parts``, see :func:`build_train_loader`."""
    if keep.source is None:
        return build_train_loader(spec, config, **parts)
    from openclip_ext.data.loader.rehearsal import build_rehearsal_loader

    return build_rehearsal_loader(spec, config, keep, **parts)


def build_train_loader(
    spec: DataSpec,
    config: TrainLoaderConfig,
    *,
    preprocess: Transform,
    tokenizer: Tokenizer,
    decoder: ImageDecoder = decode_image,
    source: Source | None = None,
) -> "AnyTrainLoader":
    """Build the training loader of a ``source``, by default the source of ``spec``. Collective: all ranks call it.

    For its errors, see :class:`TrainLoader`.
    """
    spec.check_type()
    source = build_source(spec) if source is None else source
    parts: dict[str, ShardSource] = {}
    if isinstance(source, ShardSource):
        if spec.single_source:
            parts = _parts(source, spec)
            config = replace(config, workers=math.ceil(config.workers / len(parts)))
        if spec.cache_dir is not None:
            _check_cache(source, spec, max(1, len(parts)) * max(1, config.workers))
    if source.image_features is not None:
        preprocess, decoder = _no_pixels, no_image
    epoch_samples = spec.num_samples
    if epoch_samples is not None and epoch_samples > source.num_kept and not spec.resampled:
        logger.warning(
            f"--train-num-samples {epoch_samples:,} is more than the {source.num_kept:,} samples of the data set: each "
            "epoch uses the whole data set"
        )
        epoch_samples = source.num_kept
    create = partial(
        TrainLoader,
        preprocess=preprocess,
        tokenizer=tokenizer,
        decoder=decoder,
        max_bad_fraction=spec.max_bad_fraction,
    )
    if not parts:
        return create(source, config, epoch_samples=epoch_samples)
    from openclip_ext.data.loader.single_source import SingleSourceLoader

    loaders = []
    for name, part in parts.items():
        try:
            loaders.append(create(part, config, epoch_samples=part.share_of(epoch_samples)))
        except ValueError as error:
            raise ValueError(f"--single-source-batches: source {name}: {error}") from None
    return SingleSourceLoader(source, loaders, config.accum_freq)


def _no_pixels(image: object) -> Tensor:
    return torch.empty(0)


def _parts(source: ShardSource, spec: DataSpec) -> dict[str, ShardSource]:
    """Return each ``::`` component's part of the samples, by the name of its first shard, in the order of indices."""
    components = expand_components(spec.source or "")
    if len(components) < 2:
        raise ValueError("--single-source-batches: expected several sources in --train-data, joined by '::', found 1")
    first = {shard.url: shard.first_index for shard in source.manifest.shards}
    components.sort(key=lambda urls: min(first[url] for url in urls))
    parts = {urls[0]: source.part(frozenset(urls)) for urls in components}
    return {name: part for name, part in parts.items() if part.share_of(None)}


def build_eval_loader(
    spec: DataSpec,
    *,
    preprocess: Transform,
    tokenizer: Tokenizer,
    batch_size: int,
    workers: int = 0,
) -> "EvalLoader":
    """Build the loader of validation data for one rank. Shards need no manifest. See :class:`EvalLoader`.

    Raises:
        BadDataError: The first shard cannot be read, or all of its first samples lack an image or a caption.
    """
    from openclip_ext.data.loader.eval_loader import EvalLoader, ShardStreams

    samples: ShardStreams | Source
    if spec.resolved_type == "webdataset":
        urls = expand_shards(spec.source or "")
        spec.storage.reach(urls)
        keys = SampleKeys(spec.image_key, spec.caption_key)
        samples = ShardStreams(urls, keys, spec.storage, spec.max_image_pixels)
        _refuse_without_fields(samples, spec)
    else:
        samples = build_other_source(spec)
    return EvalLoader(samples, preprocess=preprocess, tokenizer=tokenizer, batch_size=batch_size, workers=workers)


def build_source(spec: DataSpec) -> Source:
    """Return the source of a data set; for shards, find or create the manifest. Raise ValueError if the data is invalid."""
    kind, given = spec.resolved_type, spec.source or ""
    source: Source
    if kind == "synthetic":
        from openclip_ext.data.sources.synthetic import SyntheticSource

        source = SyntheticSource(_SYNTHETIC_SAMPLES if spec.num_samples is None else spec.num_samples)
    elif kind == "csv":
        # Imported only here, because pandas is slow to import.
        from openclip_ext.data.sources.csv import CsvSource

        source = CsvSource(*check_csv(spec), spec.hard_negative_key)
    elif kind == "table":
        source = table_source(spec)
    else:
        manifest = find_or_create_manifest(given, spec.manifest, spec.image_key, spec.caption_key, spec.storage)
        urls = [shard.url for shard in manifest.shards]
        _on_all_ranks(lambda: spec.storage.reach(urls))
        weights = _shard_weights(spec, urls)
        keys = spec.image_key, spec.caption_key
        more = spec.hard_negative_key, spec.caption_weights
        source = ShardSource(manifest, *keys, spec.resampled, weights, spec.storage, *more)
    source.max_pixels = spec.max_image_pixels
    if spec.reference not in (None, START):
        source.reference = EmbeddingStore.open(spec.reference, source.num_samples, source.index_digest, **spec.keys)
    return source


def number_of_pairs(spec: DataSpec) -> int:
    """Return the number of samples that are not excluded. Collective: all ranks call it. For errors, see build_source."""
    if spec.resolved_type == "webdataset":
        return build_source(spec).num_kept
    return distributed.on_rank0(lambda: build_source(spec).num_kept)


def data_files(spec: DataSpec) -> list[tuple[Any, ...]]:
    """Return the names of a data set's files, with size and modification time if the file is local."""
    files = [os.fspath(spec.manifest)] if spec.manifest else []
    if spec.resolved_type == "webdataset":
        files += expand_shards(spec.source or "")
    elif spec.resolved_type in ("csv", "table"):
        source = build_source(spec)
        assert isinstance(source, RowSource)
        files += source.files()
    return stamped(files)


def stamped(files: Iterable[str]) -> list[tuple[Any, ...]]:
    """Return the names of files, with size and modification time if the file is local and exists."""
    found: list[tuple[Any, ...]] = []
    for file in files:
        try:
            status = os.stat(file)
            found.append((file, status.st_size, status.st_mtime_ns))
        except (OSError, ValueError):  # not a local file
            found.append((file,))
    return found


def build_other_source(spec: DataSpec) -> Source:
    """Return the source of data that are not the training data, such as validation data. For errors, see build_source.

    The flags for columns may name the columns of the training data. If a table has no such columns, its own are detected.
    """
    return with_own_columns(replace(spec, hard_negative_key=None), build_source)


def detecting_columns(spec: DataSpec) -> DataSpec:
    """Return a specification without the user's separator and columns, so that a table's own are detected."""
    return replace(spec, csv_separator=DataSpec.csv_separator, csv_image_key=None, csv_caption_key=None)


def with_own_columns(spec: DataSpec, read: Callable[[DataSpec], T]) -> T:
    """Return ``read(spec)``. If it fails for a table, return the result for detected columns, or raise the first error."""
    detected = detecting_columns(spec)
    try:
        return read(spec)
    except ValueError as error:
        if spec.resolved_type in ("csv", "table") and detected != spec:
            with contextlib.suppress(ValueError):
                return read(detected)
        raise error


def table_source(spec: DataSpec) -> Source:
    """Return the source of a Parquet or JSON-lines file, saved data set or class folders; raise ValueError if invalid."""
    try:
        from openclip_ext.data.sources.table import TableSource

        (path,) = [spec.source] if isinstance(spec.source, str) else spec.source or ()
        columns = spec.csv_image_key, spec.csv_caption_key
        return TableSource(path, *columns, spec.caption_template, spec.hard_negative_key)
    except ImportError as error:
        raise ValueError(f"{spec.source} needs the package {error.name}: pip install datasets") from error


def refuse_unusable_rows(source: Source) -> None:
    """Raise ValueError with the first reason if all of a table's first rows lack a caption or an image that decodes."""
    reasons = []
    for raw in source.read([np.arange(min(_FIRST_SAMPLES, source.num_samples))]):
        try:
            source.decode(raw, decode_image)
            return
        except BadSampleError as error:
            reasons.append(str(error))
    raise ValueError(f"none of the first {len(reasons)} rows can be used: {reasons[0]}")


def check_csv(spec: DataSpec) -> tuple[str, str | None, str | None, str]:
    """Return the path, columns and separator of a CSV file; raise ValueError if its header or first rows cannot be used."""
    from openclip_ext.data.sources.csv import check_first_rows

    paths = [spec.source] if isinstance(spec.source, str) else [*(spec.source or ())]
    if len(paths) != 1:
        raise ValueError(f"expected one CSV file, got {paths}")
    table = paths[0], spec.csv_image_key, spec.csv_caption_key, spec.csv_separator
    check_first_rows(*table)
    return table


def _refuse_without_fields(samples: "ShardStreams", spec: DataSpec) -> None:
    """Raise BadDataError before training if all of the first validation samples lack an image or a caption."""
    from openclip_ext.data.loader.eval_loader import read_shard
    from openclip_ext.data.shards.diagnosis import explain

    for raw in itertools.islice(read_shard(samples.urls[0], samples.keys.fields, samples.storage), _FIRST_SAMPLES):
        with contextlib.suppress(BadSampleError):
            samples.keys.decode(raw, no_image)
            return
    reason = explain(samples.urls[0], spec.image_key, spec.caption_key, samples.storage)
    raise BadDataError(f"{samples.urls[0]} has no usable sample at its beginning: {reason}")


def _check_cache(source: ShardSource, spec: DataSpec, workers: int) -> None:
    """Raise ValueError on all ranks if a node's cache is too small for the shards that its ranks read at the same time."""
    remote = sorted((shard for shard in source.manifest.shards if not shard.is_local), key=lambda s: -s.num_samples)
    ranks = distributed.all_gather_object(platform.node()).count(platform.node())
    if remote:
        in_use = remote[: ranks * workers * SHARDS_IN_USE]
        share = sum(shard.num_samples for shard in in_use) / max(1, remote[0].num_samples)
        what = f"{len(in_use)} shards in use ({ranks} ranks of the node x {workers} workers x up to {SHARDS_IN_USE} shards)"
        _on_all_ranks(lambda: spec.storage.check_cache(remote[0].url, share, what))


def _on_all_ranks(check: Callable[[], None]) -> None:
    """Run a check on all ranks; if it fails on any rank, raise its ValueError on all."""
    failure = None
    try:
        check()
    except ValueError as error:
        failure = str(error)
    if failures := list(filter(None, distributed.all_gather_object(failure))):
        raise ValueError(failures[0])


def _shard_weights(spec: DataSpec, urls: Sequence[str]) -> list[float] | None:
    """Return the relative frequency with which each shard is sampled; None without upsampling factors."""
    factors = spec.upsampling_factors
    if factors is None:
        return None
    try:
        values = [float(value) for value in (factors.split("::") if isinstance(factors, str) else factors)]
    except ValueError:
        raise ValueError(f"--train-data-upsampling-factors {factors}: expected numbers such as 1::3") from None
    components = expand_components(spec.source or "")
    if len(values) != len(components):
        raise ValueError(f"{len(values)} upsampling factors for {len(components)} data sources: give one for each")
    if not (min(values) >= 0 and 0 < sum(values) < math.inf):
        raise ValueError(f"--train-data-upsampling-factors {factors}: expected numbers >= 0, not all 0")
    by_url = {url: value for component, value in zip(components, values, strict=True) for url in component}
    return [by_url[url] for url in urls]
