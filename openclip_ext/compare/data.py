"""Decode, split and check the data of a comparison."""

import contextlib
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from openclip_ext.cli import command_line
from openclip_ext.cli.messages import without_secrets
from openclip_ext.compare.config import CompareConfig
from openclip_ext.compare.decoded import Cache, DoesNotFit, KnownTexts, write_cache
from openclip_ext.data.flip import exchange_sides
from openclip_ext.data.loader.build import build_source, build_train_loader, data_files
from openclip_ext.data.reference import EmbeddingStore
from openclip_ext.data.sources.spec import DataSpec
from openclip_ext.evaluation.ranks import repeats
from openclip_ext.evaluation.results import config_digest
from openclip_ext.training.config import RunPlan

_HELD_OUT, _MOST_VALIDATION, _FEWEST_VALIDATION = 0.1, 5_000, 20


@dataclass(frozen=True)
class StudyData:
    """The data to train and score runs.

    Attributes:
        train: Decoded training samples. None means that they do not fit into the cache, and each run decodes them again.
        val: Samples for choosing settings.
        test: Samples for the reported results.
        names: Class names, if any.
        texts: All texts, tokenized; None if the training texts are not in memory.
        reference: A reference model's embeddings of the training samples. None (default) means no reference model.
    """

    train: Cache | None
    num_samples: int
    val: Cache
    test: Cache
    names: tuple[str, ...]
    texts: KnownTexts | None
    digest: str
    reference: EmbeddingStore | None = None


def prepare(config: CompareConfig, training: RunPlan) -> tuple[StudyData, list[str]]:
    """Return the data of a comparison, and notes about the data for the report."""
    notes: list[str] = []
    names = _class_names(config.classes)
    train, held_out = _decode(config, training, len(names) or None, notes)
    if repeated := repeats(held_out.image_hashes(), held_out.captions()):
        notes.append(f"the validation samples have {repeated}")
    val, test = (held_out.part(part) for part in divide(len(held_out), 0.5))
    if len(set(test.captions())) < 2:
        raise ValueError("all validation samples have the same caption: give different data with --val")
    texts = None
    if train is not None:
        num_samples, identity = len(train), train.digest
        captions = train.captions()
        mirrored = map(exchange_sides, captions) if training.loading.caption_aware_flip else ()
        texts = KnownTexts([*captions, *mirrored, *held_out.captions(), *names], training.model.tokenizer())
    else:
        num_samples, identity = _streamed(config, training)
        notes.append("the training images do not fit into --cache and are decoded again for each run")
    batch = training.loading.batch_size * training.loading.accum_freq
    if num_samples < 2 * batch:
        raise ValueError(f"{num_samples:,} training samples are too few for batches of {batch}: reduce --batch-size")
    reference = _reference(training.data, train)
    identity = config_digest([identity, held_out.digest, names, *([] if reference is None else [reference.about])])
    return StudyData(train, num_samples, val, test, tuple(names), texts, identity, reference), notes


def _reference(spec: DataSpec | None, train: Cache | None) -> EmbeddingStore | None:
    if spec is None or spec.reference is None:
        return None
    store = build_source(spec).reference
    assert store is not None
    return store if train is None else store.part([sample.source_index for sample in train.samples])


def _decode(
    config: CompareConfig, training: RunPlan, classes: int | None, notes: list[str]
) -> tuple[Cache | None, Cache]:
    """Return the training samples (None if they do not fit into the cache) and the validation samples."""
    assert training.data is not None, "the command line gives the shards"
    spec = replace(training.data, reference=None)  # the decoded data do not depend on the reference model
    image_size, files = _image_size(training), data_files(spec)

    def decoded(spec: DataSpec, files: Sequence[tuple[Any, ...]], classes: int | None) -> Cache:
        folder = config.folder / "cache" / config_digest([asdict(spec), files, image_size, classes])
        return write_cache(spec, folder, image_size, config.cache * 2**30, classes)

    if config.val is None:
        whole = decoded(spec, files, classes)
        held, rest = divide(len(whole), _HELD_OUT)
        notes.append(
            f"{len(held):,} random samples of {without_secrets(config.shards)}, excluded from training; near-duplicates in "
            "the training samples increase the scores of all losses"
        )
        return whole.part(rest), whole.part(held)
    val = replace(spec, source=config.val, manifest=None, num_samples=None)
    val_files = data_files(val)
    own, others = ({os.path.realpath(name) for name, *_ in part} for part in (val_files, files))
    if common := len(own & others):
        raise ValueError(f"--val: {common} of {len(own)} files are also training files: remove them from --val")
    train: Cache | None = None
    with contextlib.suppress(DoesNotFit):
        train = decoded(spec, files, None)
    held_out = decoded(val, val_files, classes)
    held_out = held_out.part(divide(len(held_out), 1.0)[0])
    notes.append(f"{len(held_out):,} validation samples of {without_secrets(config.val)}")
    return train, held_out


def _streamed(config: CompareConfig, training: RunPlan) -> tuple[int, str]:
    """Return the number of training samples and their data set's digest. Each run reads the samples from the shards."""
    assert training.data is not None, "the command line gives the shards"
    loader = build_train_loader(training.data, training.loading, preprocess=str, tokenizer=str)  # type: ignore[arg-type]
    if loader.source.num_kept < loader.num_samples:
        raise ValueError(
            f"the manifest excludes samples: expected a --cache for all images, more than {config.cache:g} GiB"
        )
    return loader.num_samples, loader.source.digest


def divide(count: int, share: float) -> tuple[list[int], list[int]]:
    """Sample a fraction ``share`` of ``count`` positions with a fixed seed; return the sampled and the other positions."""
    size = min(round(count * share), _MOST_VALIDATION)
    if size < _FEWEST_VALIDATION:
        raise ValueError(
            f"{size} of {count} samples are too few for the scores: give at least 40 with --val, or at least 400 training "
            "samples without --val"
        )
    order = torch.randperm(count, generator=torch.Generator().manual_seed(0)).tolist()
    return sorted(order[:size]), sorted(order[size:])


def _class_names(path: str | None) -> list[str]:
    if path is None:
        return []
    names = Path(path).read_text(encoding="utf-8").splitlines()
    if len(names) < 2:
        raise ValueError(f"--classes {path} has {len(names)} lines: expected at least 2, each with a class name")
    return names


def _image_size(training: RunPlan) -> int:
    with command_line.without_warnings():
        model, _, _ = replace(training.model, pretrained=None, pretrained_image=False).create(torch.device("cpu"))
    size = model.visual.image_size
    return max(size) if isinstance(size, tuple | list) else size
