"""Read evaluation sets: DataComp's layout, class folders, tables of labels and single images. Faulty data are rejected.

In DataComp's layout, ``DATA_DIR/wds_NAME_test/`` contains ``classnames.txt``, ``zeroshot_classification_templates.txt`` and
``test/`` with ``nshards.txt`` and ``{0..}.tar``. Files with the same key form a sample: an image, and its label (``cls``),
metadata (``npy``) or captions (``txt``). A fault that would silently change a score (a truncated tar, a repeated key, a label
outside the classes) raises a `DataError` with the file's path. An image that does not decode is skipped and reported.
"""

import hashlib
import io
import json
import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader

from openclip_ext.data.processes import begin_worker
from openclip_ext.data.shards import tar
from openclip_ext.data.sources.source import BadSampleError, Source, decode_image, in_8_bits, reason_of
from openclip_ext.data.sources.spec import IMAGE_FILE_ENDINGS, files_below, images_below
from openclip_ext.data.sources.spec import class_folders as subfolders

IMAGE_EXTENSIONS = ("webp", "png", "jpg", "jpeg")
CLASSNAMES_FILE = "classnames.txt"
TEMPLATES_FILE = "zeroshot_classification_templates.txt"
INSTANCES_FILE = "instances.jsonl"


class DataError(ValueError):
    """A fault in a data set that would make its score wrong. The message contains the fault and the file."""


class SampleFormat(NamedTuple):
    """Which fields a set's samples have."""

    num_classes: int | None = None  # labels (``cls``) must be below this number; None means no labels
    metadata_columns: int = 0  # length of the vector in ``npy``
    captions: bool = False  # whether ``txt`` contains captions, one per line
    # Whether to convert images to RGB before the transform, as in training. If False, OpenCLIP's transform resizes images in
    # their stored mode: palette images by nearest neighbor, and images with alpha after multiplying colors by alpha.
    convert_first: bool = True


IMAGES_ONLY = SampleFormat()


class StoredSample(NamedTuple):
    """A sample on disk. ``read()`` returns the content of its fields (``png``, ``cls``, ...) by name."""

    key: str
    where: str  # the sample's place in messages
    read: Callable[[], dict[str, bytes]]
    label: int | None = None  # the class number of a sample without a field ``cls``

    def parse(self, wanted: SampleFormat) -> tuple[bytes, dict[str, Any]]:
        """Return the encoded image, and the fields of the format (``label``, ``metadata``, ``captions``).

        Raise DataError if a field is missing or wrong.
        """
        fields = self.read()
        image = self._content(fields, *IMAGE_EXTENSIONS)
        sample: dict[str, Any] = {}
        if self.label is not None:
            sample["label"] = self.label
        elif wanted.num_classes is not None:
            label = self._content(fields, "cls").strip()
            if not label.isdigit() or int(label) >= wanted.num_classes:
                raise DataError(
                    f"{self.where}: expected a label (.cls) below {wanted.num_classes}, found {label[:20]!r}."
                )
            sample["label"] = int(label)
        if wanted.metadata_columns:
            sample["metadata"] = self._metadata(self._content(fields, "npy"), wanted.metadata_columns)
        if wanted.captions:
            sample["captions"] = self._captions(self._content(fields, "txt"))
        return image, sample

    def _content(self, fields: Mapping[str, bytes], *extensions: str) -> bytes:
        for extension in extensions:
            if extension in fields:
                return fields[extension]
        raise DataError(f"{self.where}: no .{' or .'.join(extensions)} file, found {sorted(fields)}.")

    def _metadata(self, content: bytes, columns: int) -> np.ndarray:
        try:
            values = np.lib.format.read_array(io.BytesIO(content), allow_pickle=False)
        except Exception as error:  # a corrupt header may also raise SyntaxError or TokenError
            raise DataError(f"{self.where}: the metadata (.npy) cannot be read ({error}).") from None
        if values.shape != (columns,) or not np.issubdtype(values.dtype, np.integer) or values.min() < 0:
            found = f"{values.dtype} {str(values.tolist())[:80]}"
            raise DataError(
                f"{self.where}: expected {columns} non-negative integers of metadata (.npy), found {found}."
            )
        return values.astype(np.int64)

    def _captions(self, content: bytes) -> list[str]:
        try:
            captions = [line.strip() for line in content.decode().splitlines() if line.strip()]
        except UnicodeDecodeError as error:
            raise DataError(f"{self.where}: the captions (.txt) are not UTF-8 text ({error}).") from None
        if not captions:
            raise DataError(f"{self.where}: expected one caption per line in the .txt file, found no caption.")
        return captions


@dataclass
class Batch:
    """Decoded samples in their order on disk: a batch, or what was computed from all batches of a set.

    ``values`` maps names to tensors ``(N, ...)``. A batch has ``image`` ``(B, 3, H, W)`` and, if its set has labels or
    metadata, int64 ``label`` ``(B,)`` or ``metadata`` ``(B, columns)``.
    """

    keys: list[str] = field(default_factory=list)
    values: dict[str, Tensor] = field(default_factory=dict)
    captions: list[list[str]] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)  # messages about images that do not decode, by key
    error: str = ""  # message of the fault that makes the batch unusable; empty if there is none

    def pin_memory(self) -> "Batch":
        """Pin the tensors. ``DataLoader`` calls this method if ``pin_memory=True``."""
        return replace(self, values={name: value.pin_memory() for name, value in self.values.items()})


@dataclass(frozen=True)
class Samples:
    """The samples of an evaluation set in their order on disk. All evaluations read images with this class."""

    name: str
    stored: Sequence[StoredSample]
    format: SampleFormat = IMAGES_ONLY

    def __len__(self) -> int:
        return len(self.stored)

    def batches(
        self, transform: Callable[[Image.Image], Tensor], batch_size: int, workers: int, pin_memory: bool = False
    ) -> Iterator[Batch]:
        """Read and decode samples in batches. Workers start immediately, and read images while the caller encodes texts."""
        loader: DataLoader[Any] = DataLoader(
            self.stored,  # type: ignore[arg-type]  # any sequence is a data set
            batch_size,
            num_workers=min(workers, -(-len(self.stored) // batch_size)),
            collate_fn=partial(_read_batch, transform=transform, wanted=self.format),
            worker_init_fn=begin_worker,
            pin_memory=pin_memory,
            # A DataLoader draws a seed for its workers. The global generator, which training may use, must not change.
            generator=torch.Generator(),
        )
        return iter(loader)


def _read_batch(
    samples: Sequence[StoredSample], transform: Callable[[Image.Image], Tensor], wanted: SampleFormat
) -> Batch:
    """Read and decode samples. The message of a `DataError` is returned in ``error``, because workers cannot raise it."""
    batch = Batch()
    rows = defaultdict(list)
    for stored in samples:
        try:
            content, fields = stored.parse(wanted)
        except (DataError, OSError) as error:
            return Batch(error=str(error))
        try:
            image = decode_image(content) if wanted.convert_first else _decode_unconverted(content)
        except BadSampleError as error:
            batch.skipped[stored.key] = f"{stored.where}: {error}"
            continue
        batch.keys.append(stored.key)
        batch.captions.append(fields.pop("captions", []))
        for name, value in {"image": transform(image), **fields}.items():
            rows[name].append(torch.as_tensor(value))
    batch.values = {name: torch.stack(row) for name, row in rows.items()}
    return batch


def _decode_unconverted(content: bytes) -> Image.Image:
    try:
        image = Image.open(io.BytesIO(content))
        image.load()
        return in_8_bits(image)
    except Exception as error:  # decoders raise many exceptions, even struct.error and SyntaxError
        raise BadSampleError(f"the image does not decode: {reason_of(error)}") from error


class Labeled(NamedTuple):
    """A set of labeled images, with names of its classes (which may repeat) and prompts with ``{c}`` for a class's name."""

    samples: Samples
    classnames: Sequence[str]
    templates: Sequence[str]


# --- DataComp's layout ------------------------------------------------------------------------------------------------


def read_lines(path: Path, what: str, are_labels: bool = False) -> list[str]:
    """Return a text file's non-blank lines, stripped; raise DataError without any. ``what`` names the lines in messages.

    If the numbers of the lines are labels, a blank line between others is also an error.
    """
    try:
        lines = [line.strip() for line in path.read_text(encoding="utf-8-sig").rstrip().splitlines()]
    except FileNotFoundError:
        raise DataError(f"{path} not found: expected the {what}, one per line.") from None
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 text ({error}).") from None
    if not any(lines):
        raise DataError(f"{path} is empty: expected the {what}, one per line.")
    if are_labels and "" in lines:
        raise DataError(
            f"{path}: line {lines.index('') + 1} is blank, so later labels would shift. Name its class, or remove it."
        )
    return [line for line in lines if line]


def read_templates(path: Path) -> list[str]:
    """Return prompt templates, in which ``{c}`` stands for the class name; raise DataError for any other braces."""
    templates = read_lines(path, "prompt templates")
    other = {*"{}"}.intersection("".join(templates).replace("{c}", ""))
    if other or not any("{c}" in template for template in templates):
        raise DataError(f"{path}: expected {{c}} for the class name, and no other text in braces.")
    return templates


def read_classes(folder: Path, expected: int | None = None) -> tuple[list[str], list[str]]:
    """Return class names, which may repeat, and prompt templates; raise DataError for a wrong number of classes."""
    classnames = read_lines(folder / CLASSNAMES_FILE, "class names", are_labels=True)
    templates = read_templates(folder / TEMPLATES_FILE)
    if expected is not None and len(classnames) != expected:
        raise DataError(
            f"{folder / CLASSNAMES_FILE}: expected DataComp's {expected} classes, found {len(classnames)}. "
            "Download the data set again. openclip-ext evaluate accepts a different size with --allow-size-mismatch."
        )
    return classnames, templates


def find_shards(folder: Path) -> list[Path]:
    """Return the test split's shards; raise DataError if they are not 0.tar to N-1.tar for the N in ``nshards.txt``."""
    count_file = folder / "test" / "nshards.txt"
    text = read_lines(count_file, "number of shards")[0]
    if not re.fullmatch("[1-9][0-9]{0,5}", text):
        raise DataError(f"{count_file}: expected the number of shards, found {text!r}.")
    shards = [folder / "test" / f"{number}.tar" for number in range(int(text))]
    if wrong := {*shards}.symmetric_difference(folder.glob("test/*.tar")):
        names = ", ".join(sorted(path.name for path in wrong)[:5])
        raise DataError(f"{count_file}: expected {text} shards numbered from 0.tar, missing or extra: {names}.")
    return shards


def read_shard(shard: Path, wanted: frozenset[str] | None = None) -> list[tar.TarSample]:
    """Return a shard's samples in file order, with the content of the ``wanted`` fields. None (default) means all fields."""
    try:
        with open(shard, "rb") as file:
            if file.read(8).startswith((*tar.COMPRESSED,)):
                raise DataError(f"{shard} is compressed: expected a plain tar. Decompress it.")
            file.seek(0)
            archive = tar.TarArchive(file)
            samples = list(archive.samples(wanted))
            if archive.gaps:
                raise tar.TarError(f"no file header at byte {archive.gaps[0].start}")
    except tar.STREAM_ERRORS as error:
        raise DataError(f"{shard} is truncated or corrupt ({error}). Remove it, and download it again.") from None
    return samples


def stored_in(shard: Path, sample: tar.TarSample) -> StoredSample:
    """Return a sample of a tar, whose content is read later."""
    members = dict(zip(sample.found, sample.members, strict=True))
    return StoredSample(sample.key, f"{shard}: {sample.key}", partial(_read_members, shard, members))


def _read_members(shard: Path, members: Mapping[str, tar.Member]) -> dict[str, bytes]:
    fields = {}
    with open(shard, "rb") as stream:
        for name, member in members.items():
            stream.seek(member.data)
            fields[name] = stream.read(member.size)
    return fields


def shard_samples(folder: Path, wanted: SampleFormat) -> Samples:
    """Return the samples of a folder in DataComp's layout; raise DataError for a corrupt shard or a repeated key."""
    found: dict[str, tuple[StoredSample, Path]] = {}
    for shard in find_shards(folder):
        for sample in read_shard(shard, frozenset()):
            if sample.key in found:
                raise DataError(
                    f"key {sample.key!r} occurs twice, in {found[sample.key][1]} and in {shard}: one of the samples is a "
                    "copy or belongs to another data set. Download the data set again."
                )
            found[sample.key] = stored_in(shard, sample), shard
    return Samples(folder.name, [stored for stored, _ in found.values()], wanted)


class Instance(NamedTuple):
    """A cue of WinoGAViL, and the keys of images: the candidates, and those that belong to the cue."""

    cue: str
    candidates: tuple[str, ...]
    associations: frozenset[str]


def read_instances(folder: Path, keys: Collection[str]) -> list[Instance]:
    """Return the instances in ``instances.jsonl``; raise DataError for an invalid line or an image that is not in ``keys``."""
    path = folder / INSTANCES_FILE
    instances = []
    for number, line in enumerate(read_lines(path, "WinoGAViL instances (JSON)"), start=1):
        try:
            content = json.loads(line)
            candidates, associations = (tuple(map(str, content[name])) for name in ("candidates", "associations"))
            instance = Instance(str(content["cue"]), candidates, frozenset(associations))
            if not instance.cue or not associations or not instance.associations <= {*candidates}:
                raise ValueError("no cue, no associations, or an association that is not a candidate")
        except (ValueError, KeyError, TypeError) as error:
            wanted = "an object with cue, candidates and associations"
            raise DataError(f"{path}, line {number}: expected {wanted}, found {line[:80]} ({error!r}).") from None
        if unknown := {*candidates}.difference(keys):
            raise DataError(f"{path}, line {number}: no image {', '.join(sorted(unknown))} in the shards.")
        instances.append(instance)
    return instances


def fingerprint(path: Path) -> str:
    """Return a digest of the names, sizes and modification times of a data set's files."""
    digest = hashlib.sha256()
    if (path / "test" / "nshards.txt").is_file():  # DataComp's layout
        # glob follows a link to test/, which rglob does not. A broken link counts as missing, so the task itself reports it.
        inside = [found for pattern in ("*", "test/*") for found in path.glob(pattern)]
        inside = [found for found in inside if found.suffix in (".txt", ".jsonl", ".tar")]
    elif path.is_dir():
        inside = [*map(Path, files_below(str(path)))]  # links to class folders are followed
    else:
        inside = [path]
    for found in sorted(found for found in inside if found.is_file()):
        status = found.stat()
        digest.update(f"{found.relative_to(path.parent)}\0{status.st_size}\0{status.st_mtime_ns}\0".encode())
    return digest.hexdigest()[:16]


# --- Images in files and in tables ------------------------------------------------------------------------------------


def image_files(folder: Path) -> list[Path]:
    """Return the image files below a folder, sorted and without hidden ones; raise DataError if there are none."""
    if not (paths := [Path(path) for path in images_below(str(folder))]):
        raise DataError(f"{folder} has no images ({', '.join(IMAGE_FILE_ENDINGS)}).")
    return paths


def file_samples(name: str, paths: Iterable[Path], labels: Iterable[int | None] | None = None) -> Samples:
    """Return the samples of image files; a sample's key is its path."""
    paths = list(paths)
    numbers = [None] * len(paths) if labels is None else list(labels)
    stored = [
        StoredSample(str(path), str(path), partial(_read_file, path), label)
        for path, label in zip(paths, numbers, strict=True)
    ]
    return Samples(name, stored)


def _read_file(path: Path) -> dict[str, bytes]:
    return {IMAGE_EXTENSIONS[0]: path.read_bytes()}


def class_folders(
    folder: Path, numbered: Callable[[list[str]], Mapping[str, int]] | None = None
) -> tuple[Samples, list[str]]:
    """Return the images of a folder with one folder per class, and the folders' names in the order of labels.

    Files and folders whose names start with a dot are skipped. ``numbered`` returns the labels by name; None (default) means
    the places in alphabetical order. Raise DataError if a folder has no image.
    """
    names = subfolders(str(folder))
    labels = {name: place for place, name in enumerate(names)} if numbered is None else numbered(names)
    if not names:
        raise DataError(f"{folder}: expected one folder of images for each class, found no folder.")
    files = [(path, labels[name]) for name in names for path in image_files(folder / name)]
    paths, numbers = zip(*files, strict=True)
    return file_samples(folder.name, paths, numbers), sorted(labels, key=lambda name: labels[name])


def source_samples(name: str, source: Source) -> tuple[Samples, list[str]]:
    """Return the samples of a table whose captions are labels, and the different labels in alphabetical order."""
    described = (source.describe(raw) for raw in source.read([np.arange(source.num_samples)]))
    rows = [(path, label.strip()) for path, label in described]
    if unlabeled := [number for number, (_, label) in enumerate(rows) if not label]:
        raise DataError(
            f"{name}: row {unlabeled[0]} has no label ({len(unlabeled)} of {len(rows)} rows have none). Add the labels."
        )
    classes = sorted({label for _, label in rows})
    numbers = {label: number for number, label in enumerate(classes)}
    stored = [
        StoredSample(
            f"row {index}", f"{name}: {path or f'row {index}'}", partial(_read_row, source, index), numbers[label]
        )
        for index, (path, label) in enumerate(rows)
    ]
    return Samples(name, stored), classes


def _read_row(source: Source, index: int) -> dict[str, bytes]:
    def content(data: Any) -> Any:
        return data if isinstance(data, bytes) else data.read()

    try:
        image, _ = source.decode(source.read_one(index), content)
    except ValueError as error:  # a bad sample, such as a missing file
        raise DataError(str(error)) from None
    return {IMAGE_EXTENSIONS[0]: image}  # type: ignore[dict-item]  # the decoder returns the file's content
