"""The data of a comparison: decoded, divided, and checked."""

import contextlib
import hashlib
import itertools
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from openclip_ext.data.build import build_source, build_train_loader
from openclip_ext.data.shardlist import expand_shards
from openclip_ext.data.spec import DataSpec
from openclip_ext.diagnostics import command_line
from openclip_ext.diagnostics.compare.config import CompareConfig
from openclip_ext.diagnostics.compare.pilot import Pilot
from openclip_ext.diagnostics.compare.samples import Cache, DoesNotFit, PilotData, Tokens, divide, write_cache
from openclip_ext.training.config import TrainingConfig

_HELD_OUT, _MOST_VALIDATION = 0.1, 5_000


@dataclass(frozen=True)
class Prepared:
    """Data that are ready for runs.

    Attributes:
        pilot: with the data.
        notes: what to know about them.
        caches: folders of decoded samples.
    """

    pilot: Pilot
    notes: tuple[str, ...]
    caches: tuple[Path, ...]


def cache_folder(output: Path) -> Path:
    """Where the caches of a comparison are."""
    return output / "cache"


def prepare(config: CompareConfig, training: TrainingConfig, loss_options: Mapping[str, Any]) -> Prepared:
    """Decode the data, and divide them.

    Raises:
        ValueError: they do not fit the command line.
        DoesNotFit: the validation samples are larger than ``--cache``.
        BadDataError: too many samples cannot be read.
    """
    names = _class_names(config.classes)
    decoder = _Decoder(cache_folder(config.output), _image_size(training), config.cache)
    train, held_out, notes = _decode(config, training, decoder, len(names) or None)
    choice, verdict = divide(len(held_out.rows), 0.5, _MOST_VALIDATION)
    if len(set(held_out.part(verdict).captions())) < 2:
        raise ValueError(
            "the validation samples have one caption only, so that nothing can be retrieved: give others with --val"
        )
    tokens = None
    if isinstance(train, Cache):
        num_samples, identity = len(train.rows), train.digest
        texts = itertools.chain(train.captions(), held_out.captions(), names)
        tokens = Tokens.of(texts, training.model.tokenizer())
    else:
        num_samples, identity = _streamed(train, training, config.cache)
        notes.append("the training images are larger than --cache and are decoded again for each run")
    batch = training.loading.batch_size * training.loading.accum_freq
    if num_samples < 2 * batch:
        raise ValueError(f"{num_samples:,} training samples are too few for batches of {batch}: lower --batch-size")
    data = PilotData(
        train,
        num_samples,
        held_out.part(choice),
        held_out.part(verdict),
        tuple(names),
        tokens,
        digest([identity, held_out.digest, names]),
    )
    pilot = Pilot(training, dict(loss_options), data, config.population, config.anchors)
    return Prepared(pilot, tuple(notes), tuple(decoder.folders))


class _Decoder:
    """Decodes data sets, each into a folder of its own.

    Args:
        parent: of the folders.
        image_size: side of the model's images.
        gib: that each may take.

    Attributes:
        folders: of the data sets so far.
    """

    def __init__(self, parent: Path, image_size: int, gib: float) -> None:
        self.parent, self.image_size, self.gib = parent, image_size, gib
        self.folders: list[Path] = []

    def __call__(self, spec: DataSpec, classes: int | None) -> Cache:
        folder = self.parent / digest([asdict(spec), _state_of_files(spec), self.image_size, classes])
        self.folders.append(folder)
        progress = partial(command_line.progress_bar, desc="decoding", unit="sample", leave=False)
        return write_cache(spec, folder, self.image_size, self.gib * 2**30, classes, progress)


def _decode(
    config: CompareConfig, training: TrainingConfig, decoder: _Decoder, classes: int | None
) -> tuple[Cache | DataSpec, Cache, list[str]]:
    """Training samples, or where to read them where they are too large; validation samples; and what to say."""
    assert training.data is not None
    if config.val is None:
        try:
            whole = decoder(training.data, classes)
        except DoesNotFit as error:
            raise ValueError(f"{error}; give more, or validation data with --val") from None
        held, rest = divide(len(whole.rows), _HELD_OUT, _MOST_VALIDATION)
        note = (
            f"{len(held):,} samples drawn from {config.shards} and not trained on; with near-duplicates among the training "
            "samples the scores are too high for all losses"
        )
        return whole.part(rest), whole.part(held), [note]
    train: Cache | DataSpec = training.data
    with contextlib.suppress(DoesNotFit):
        train = decoder(training.data, None)
    held_out = decoder(replace(training.data, source=config.val, manifest=None, num_samples=None), classes)
    held_out = held_out.part(divide(len(held_out.rows), 1.0, _MOST_VALIDATION)[0])
    different = len(set(held_out.captions()))
    with_captions = "" if different == len(held_out.rows) else f" with {different:,} different captions"
    return train, held_out, [f"{len(held_out.rows):,} validation samples of {config.val}{with_captions}"]


def _streamed(spec: DataSpec, training: TrainingConfig, gib: float) -> tuple[int, str]:
    """Number and digest of training samples that each run reads from their files."""
    loader = build_train_loader(spec, training.loading, preprocess=str, tokenizer=str)  # type: ignore[arg-type]
    if loader.source.num_kept < loader.num_samples:
        raise ValueError(f"the manifest leaves samples out, and the others do not fit into --cache {gib:g}: give more")
    return loader.num_samples, loader.source.digest


def _state_of_files(spec: DataSpec) -> list[Any]:
    """Names of a data set's files; of local ones also size and time of change."""
    files = [spec.manifest] if spec.manifest else []
    if spec.resolved_type == "webdataset":
        assert spec.source is not None
        files += expand_shards(spec.source)
    elif spec.resolved_type == "csv":
        source: Any = build_source(spec, preprocess=str)  # type: ignore[arg-type]
        files += source.files()
    return [(file, *_state(Path(file))) for file in files]


def _state(path: Path) -> tuple[int, ...]:
    try:
        found = path.stat()
    except (OSError, ValueError):  # not a local file, or none at all
        return ()
    return found.st_size, found.st_mtime_ns


def _class_names(path: Path | None) -> list[str]:
    if path is None:
        return []
    try:
        names = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"--classes {path} cannot be read: {error}") from error
    if len(names) < 2:
        raise ValueError(f"--classes {path} has {len(names)} lines: expected the name of a class on each of at least 2")
    return names


def _image_size(training: TrainingConfig) -> int:
    with command_line.without_warnings():
        model, _, _ = replace(training.model, pretrained=None, pretrained_image=False).create(torch.device("cpu"))
    size = model.visual.image_size
    return max(size) if isinstance(size, tuple | list) else size


def digest(content: Any) -> str:
    """A name for any content that JSON can hold."""
    return hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()[:16]
