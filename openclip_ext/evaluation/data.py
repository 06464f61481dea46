"""Read evaluation data sets in DataComp's on-disk format, and reject faulty data.

``DATA_DIR/wds_NAME_test/`` contains ``classnames.txt``, ``zeroshot_classification_templates.txt`` and ``test/`` with
``nshards.txt`` and ``{0..}.tar``. Files with the same key form a sample: an image, and its label (``cls``), metadata (``npy``)
or captions (``txt``). A fault that would silently change a score (a truncated tar, a repeated key, a label outside the
classes) raises a `DataError` with the file's path. An image that does not decode is skipped and reported.
"""

import hashlib
import io
import json
import re
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from openclip_ext.data.shards import tar
from openclip_ext.data.sources.source import reason_of
from openclip_ext.evaluation.tasks import Task

IMAGE_EXTENSIONS = ("webp", "png", "jpg", "jpeg")
CLASSNAMES_FILE = "classnames.txt"
TEMPLATES_FILE = "zeroshot_classification_templates.txt"
INSTANCES_FILE = "instances.jsonl"


class DataError(ValueError):
    """A fault in a data set that would make its score wrong. The message contains the fault and the file."""


class SampleFormat(NamedTuple):
    """Format of a task's samples."""

    num_classes: int | None = None  # labels (``cls``) must be below this number; None means no labels
    metadata_columns: int = 0  # length of the vector in ``npy``
    captions: bool = False  # whether ``txt`` contains captions, one per line
    # Whether to convert images to RGB before the transform. If False, OpenCLIP's transform resizes images in their stored
    # mode: palette images by nearest neighbor, and images with alpha after multiplying colors by alpha.
    convert_first: bool = True


class StoredSample(NamedTuple):
    """A sample on disk: members of a tar by field (``png``, ``cls``, ...), or an image file, which has no members."""

    file: Path
    key: str
    members: Mapping[str, tar.Member]

    def __str__(self) -> str:
        return f"{self.file}: {self.key}" if self.members else self.key

    def read(self) -> dict[str, bytes]:
        """Return the content of each field by name."""
        if not self.members:
            return {IMAGE_EXTENSIONS[0]: self.file.read_bytes()}
        fields = {}
        with open(self.file, "rb") as stream:
            for name, member in self.members.items():
                stream.seek(member.data)
                fields[name] = stream.read(member.size)
        return fields


@dataclass
class Samples:
    """Samples in their order on disk: a batch, or the results for a complete data set.

    ``values`` maps names to tensors ``(N, ...)``. A batch has ``image`` ``(B, 3, H, W)`` and, if its task has labels or
    metadata, int64 ``label`` ``(B,)`` or ``metadata`` ``(B, columns)``.
    """

    keys: list[str] = field(default_factory=list)
    values: dict[str, Tensor] = field(default_factory=dict)
    captions: list[list[str]] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)  # messages about images that do not decode, by key
    error: str = ""  # message of the fault that makes the batch unusable; empty if there is none

    def pin_memory(self) -> "Samples":
        """Pin the tensors. ``DataLoader`` calls this method if ``pin_memory=True``."""
        return replace(self, values={name: value.pin_memory() for name, value in self.values.items()})


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


def read_classes(folder: Path, task: Task, any_size: bool = False) -> tuple[list[str], list[str]]:
    """Return class names, which may repeat, and prompt templates, in which ``{c}`` stands for the class name."""
    classnames = read_lines(folder / CLASSNAMES_FILE, "class names", are_labels=True)
    templates = read_lines(folder / TEMPLATES_FILE, "prompt templates")
    other = {*"{}"}.intersection("".join(templates).replace("{c}", ""))
    if other or not any("{c}" in template for template in templates):
        raise DataError(f"{folder / TEMPLATES_FILE}: expected {{c}} for the class name, and no other text in braces.")
    if task.classes is not None and len(classnames) != task.classes and not any_size:
        raise DataError(
            f"{folder / CLASSNAMES_FILE}: expected DataComp's {task.classes} classes, found {len(classnames)}. "
            "Download the data set again. openclip-ext evaluate accepts another size with --allow-size-mismatch."
        )
    return classnames, templates


class Instance(NamedTuple):
    """A WinoGAViL cue, the keys of its 5, 6, 10 or 12 candidate images, and the keys that people associated with the cue."""

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


def find_samples(folder: Path) -> list[StoredSample]:
    """Return the test split's samples in disk order; raise DataError if a shard is missing or corrupt, or a key repeats."""
    found: dict[str, StoredSample] = {}
    for shard in find_shards(folder):
        for sample in read_shard(shard, frozenset()):
            if sample.key in found:
                raise DataError(
                    f"key {sample.key!r} occurs twice, in {found[sample.key].file} and in {shard}: one of the samples is a "
                    "copy or belongs to another data set. Download the data set again."
                )
            found[sample.key] = StoredSample(shard, sample.key, dict(zip(sample.found, sample.members, strict=True)))
    return list(found.values())


def fingerprint(folder: Path) -> str:
    """Return a digest of the names, sizes and modification times of a data set's text files and shards."""
    digest = hashlib.sha256()
    # glob follows a link to test/, which rglob does not. A broken link counts as missing, so the task itself reports it.
    paths = (path for pattern in ("*", "test/*") for path in folder.glob(pattern))
    for path in sorted(path for path in paths if path.suffix in (".txt", ".jsonl", ".tar") and path.is_file()):
        status = path.stat()
        digest.update(f"{path.relative_to(folder)}\0{status.st_size}\0{status.st_mtime_ns}\0".encode())
    return digest.hexdigest()[:16]


def read_batch(
    samples: Sequence[StoredSample], transform: Callable[[Image.Image], Tensor], spec: SampleFormat
) -> Samples:
    """Read and decode samples: the ``collate_fn`` of a DataLoader. The message of a `DataError` is returned in ``error``."""
    batch = Samples()
    rows = defaultdict(list)
    for stored in samples:
        try:
            content, fields = parse_sample(stored.read(), spec, str(stored))
        except DataError as error:
            return Samples(error=str(error))
        try:
            image: Image.Image = Image.open(io.BytesIO(content))
            image.load()
            image = image.convert("RGB") if spec.convert_first else image
        except Exception as error:  # decoders raise many exceptions, even struct.error and SyntaxError
            batch.skipped[stored.key] = f"{stored}: the image does not decode: {reason_of(error)}"
            continue
        batch.keys.append(stored.key)
        batch.captions.append(fields.pop("captions", []))
        for name, value in {"image": transform(image), **fields}.items():
            rows[name].append(torch.as_tensor(value))
    batch.values = {name: torch.stack(row) for name, row in rows.items()}
    return batch


def parse_sample(fields: dict[str, bytes], spec: SampleFormat, where: str) -> tuple[bytes, dict[str, Any]]:
    """Return a sample's encoded image, and the fields that ``spec`` requires (``label``, ``metadata``, ``captions``).

    Raise DataError if a field is missing or wrong. The message starts with ``where``.
    """

    def content_of(*extensions: str) -> bytes:
        for extension in extensions:
            if extension in fields:
                return fields[extension]
        raise DataError(f"{where}: no .{' or .'.join(extensions)} file, found {sorted(fields)}.")

    sample: dict[str, Any] = {}
    image = content_of(*IMAGE_EXTENSIONS)
    if spec.num_classes is not None:
        label = content_of("cls").strip()
        if not label.isdigit() or int(label) >= spec.num_classes:
            raise DataError(f"{where}: expected a label (.cls) below {spec.num_classes}, found {label[:20]!r}.")
        sample["label"] = int(label)
    if spec.metadata_columns:
        content, columns = content_of("npy"), spec.metadata_columns
        try:
            values = np.lib.format.read_array(io.BytesIO(content), allow_pickle=False)
        except Exception as error:  # a corrupt header may also raise SyntaxError or TokenError
            raise DataError(f"{where}: the metadata (.npy) cannot be read ({error}).") from None
        if values.shape != (columns,) or not np.issubdtype(values.dtype, np.integer) or values.min() < 0:
            found = f"{values.dtype} {str(values.tolist())[:80]}"
            raise DataError(f"{where}: expected {columns} non-negative integers of metadata (.npy), found {found}.")
        sample["metadata"] = values.astype(np.int64)
    if spec.captions:
        try:
            lines = content_of("txt").decode().splitlines()
        except UnicodeDecodeError as error:
            raise DataError(f"{where}: the captions (.txt) are not UTF-8 text ({error}).") from None
        sample["captions"] = [line.strip() for line in lines if line.strip()]
        if not sample["captions"]:
            raise DataError(f"{where}: expected one caption per line in the .txt file, found no caption.")
    return image, sample
