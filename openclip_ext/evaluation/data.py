"""Read evaluation data sets in DataComp's on-disk format, strictly.

``DATA_DIR/wds_NAME_test/`` holds ``classnames.txt``, ``zeroshot_classification_templates.txt`` and ``test/`` with
``nshards.txt`` and ``{0..}.tar``. The files of one key are a sample: an image, and ``cls``, ``npy`` or ``txt``.
Every fault that would change a score silently (a truncated tar, a short shard count, a repeated key, a label outside the
classes) is a `DataError` that names the file. An image that does not decode is skipped, counted and named.
"""

import hashlib
import io
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset

from openclip_ext.data.shards import tar
from openclip_ext.evaluation.tasks import Task

IMAGE_EXTENSIONS = ("webp", "png", "jpg", "jpeg")
CLASSNAMES_FILE = "classnames.txt"
TEMPLATES_FILE = "zeroshot_classification_templates.txt"
INSTANCES_FILE = "instances.jsonl"
# A tar ends with two blocks of zeros.
_END_OF_ARCHIVE = bytes(2 * tar.BLOCK)


class DataError(ValueError):
    """Says why a data set must not be scored: the fault, its place, and the remedy."""


@dataclass(frozen=True)
class SampleFormat:
    """Describes how to read the samples of a task.

    Attributes:
        num_classes: labels (``cls``) are read and must be in ``[0, num_classes)``; None means no labels.
        metadata_columns: length of the ``npy`` vector; 0 means that none is read.
        captions: whether ``txt`` holds captions, one per line.
        convert_first: whether images become RGB before the transform. If not, the transform gets them as they are stored,
            and OpenCLIP's resizes them first: palette images by nearest neighbor, alpha premultiplied.
    """

    num_classes: int | None = None
    metadata_columns: int = 0
    captions: bool = False
    convert_first: bool = True


class StoredSample(NamedTuple):
    """Names the bytes of a sample: those of its ``members`` in a tar, or a whole image file."""

    file: Path
    key: str
    members: Mapping[str, tar.Member]  # by field: an image's extension, ``cls``, ``npy`` or ``txt``

    @classmethod
    def of_image(cls, path: Path) -> "StoredSample":
        """Return the sample that is an image file, with its path as the key."""
        member = tar.Member(path.name, 0, 0, path.stat().st_size, is_file=True)
        return cls(path, str(path), {IMAGE_EXTENSIONS[0]: member})

    def __str__(self) -> str:
        return self.key if self.key == str(self.file) else f"{self.file}: {self.key}"

    def read(self) -> dict[str, bytes]:
        """Return the content of all fields."""
        fields = {}
        with open(self.file, "rb") as stream:
            for field, member in self.members.items():
                stream.seek(member.data)
                fields[field] = stream.read(member.size)
        return fields


class Skipped(NamedTuple):
    """Describes a sample that was left out because its image does not decode."""

    where: str
    key: str
    reason: str

    def __str__(self) -> str:
        return f"{self.where}: {self.reason}"


@dataclass
class Samples:
    """Holds samples in their order on disk: those of a batch, or what was computed for all of a data set.

    Attributes:
        values: ``(N, ...)`` by name. In a batch these are ``image`` ``(B, 3, H, W)`` of the type that the transform returns,
            ``label`` ``(B,)`` and ``metadata`` ``(B, columns)``, both int64, if the task has them.
        captions: captions of each sample; the lists are empty if the task has none.
    """

    keys: list[str]
    values: dict[str, Tensor]
    captions: list[list[str]]
    skipped: list[Skipped]

    def pin_memory(self) -> "Samples":
        """Pin the tensors; ``DataLoader`` calls this with ``pin_memory=True``."""
        return replace(self, values={name: value.pin_memory() for name, value in self.values.items()})


def read_lines(path: Path, what: str) -> list[str]:
    """Return the stripped lines of a text file, without blank lines."""
    try:
        lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
    except FileNotFoundError:
        raise DataError(f"{path} is missing: it must hold the {what}, one per line.") from None
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 text ({error}).") from None
    lines = [line for line in lines if line]
    if not lines:
        raise DataError(f"{path} holds no {what}: expected one per line.")
    return lines


def read_classes(folder: Path, task: Task, any_size: bool = False) -> tuple[list[str], list[str]]:
    """Return class names (duplicates kept) and prompt templates (``{c}`` stands for the class name)."""
    classnames = read_lines(folder / CLASSNAMES_FILE, "class names")
    templates = read_lines(folder / TEMPLATES_FILE, "prompt templates")
    for template in templates:
        try:
            template.format(c="x")
        except (KeyError, IndexError, ValueError) as error:
            raise DataError(f"{folder / TEMPLATES_FILE}: {template!r} has a field besides {{c}} ({error}).") from None
    if not any("{c}" in template for template in templates):
        raise DataError(f"{folder / TEMPLATES_FILE}: no template has a {{c}} for the class name.")
    if task.classes is not None and len(classnames) != task.classes and not any_size:
        raise DataError(
            f"{folder / CLASSNAMES_FILE} lists {len(classnames)} classes, DataComp's has {task.classes}; "
            f"fetch the data set again, or score it as it is with --allow-size-mismatch."
        )
    return classnames, templates


@dataclass(frozen=True)
class Instance:
    """Holds a riddle of WinoGAViL: choose the candidate images that go with the cue.

    Attributes:
        candidates: keys of 5, 6, 10 or 12 images.
        associations: the candidates that people chose.
    """

    cue: str
    candidates: tuple[str, ...]
    associations: frozenset[str]

    @property
    def prompt(self) -> str:
        """Return ``A cue`` or ``An cue``, as DataComp does."""
        cue = self.cue.lower()
        return f"{'An' if cue[0] in 'aeiou' else 'A'} {cue}"


def read_instances(folder: Path) -> list[Instance]:
    """Read the lines of ``instances.jsonl``."""
    path = folder / INSTANCES_FILE
    instances = []
    for number, line in enumerate(read_lines(path, "WinoGAViL instances (JSON)"), start=1):
        try:
            content = json.loads(line)
            cue, candidates = content["cue"], tuple(content["candidates"])
            instance = Instance(cue, candidates, frozenset(content["associations"]))
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(
                f"{path}, line {number}: expected an object with cue, candidates and associations, "
                f"found {line[:80]} ({error!r})."
            ) from None
        if not cue or not instance.associations or not instance.associations <= set(candidates):
            raise DataError(f"{path}, line {number}: the associations must be some of the candidates, the cue a word.")
        instances.append(instance)
    return instances


def find_shards(folder: Path) -> list[Path]:
    """Return the shards of the test split, after checking that all exist and end as a tar ends."""
    count_file = folder / "test" / "nshards.txt"
    text = read_lines(count_file, "number of shards")[0]
    if not re.fullmatch("[0-9]{1,6}", text) or int(text) < 1:
        raise DataError(f"{count_file} says {text!r}: expected the number of shards.")
    shards = [folder / "test" / f"{number}.tar" for number in range(int(text))]
    present = sorted(path.name for path in (folder / "test").glob("*.tar"))
    missing = [path.name for path in shards if path.name not in present]
    if missing:
        raise DataError(f"{count_file} says {len(shards)} shards, but {', '.join(missing)} is missing.")
    if len(present) > len(shards):
        raise DataError(
            f"{count_file} says {len(shards)} shards, but the folder has {len(present)}: the count is short."
        )
    for shard in shards:  # a truncated tar lacks the mark at its end
        size = shard.stat().st_size
        with open(shard, "rb") as stream:
            stream.seek(max(0, size - len(_END_OF_ARCHIVE)))
            if size % tar.BLOCK or stream.read() != _END_OF_ARCHIVE:
                raise DataError(
                    f"{shard} is truncated or no tar ({size} bytes, no end-of-archive mark): fetch it again."
                )
    return shards


def read_shard(shard: Path, wanted: frozenset[str] | None = None) -> Iterator[tar.TarSample]:
    """Yield the samples in file order with the content of the wanted fields (None: of all)."""
    try:
        with open(shard, "rb") as file:
            archive = tar.TarArchive(file)
            for sample in archive.samples(wanted):
                if archive.gaps:
                    break
                yield sample
    except tar.STREAM_ERRORS as error:
        raise DataError(f"{shard}: cannot be read as a tar ({error}): fetch it again.") from None
    if archive.gaps:
        raise DataError(
            f"{shard}: cannot be read as a tar, damaged at byte {archive.gaps[0].start} (no file header): fetch it again."
        )


def find_samples(folder: Path) -> list[StoredSample]:
    """Return the samples of the test split, from the headers of its shards, in their order on disk.

    Raises:
        DataError: if a shard is missing or damaged, or a key occurs twice, because a copied shard would count twice.
    """
    found: dict[str, StoredSample] = {}
    for shard in find_shards(folder):
        for sample in read_shard(shard, frozenset()):
            if sample.key in found:
                raise DataError(
                    f"key {sample.key!r} occurs twice, in {found[sample.key].file} and in {shard}, so one of them is a copy "
                    "or belongs to another data set. Fetch the data set again."
                )
            members = dict(zip(sample.found, sample.members, strict=True))
            found[sample.key] = StoredSample(shard, sample.key, members)
    return list(found.values())


def fingerprint(folder: Path) -> str:
    """Return a digest of a data set's texts and of its shards' names and sizes, which tells data sets apart."""
    digest = hashlib.sha256()
    for path in sorted(path for path in folder.rglob("*") if path.suffix in (".txt", ".jsonl", ".tar")):
        content = str(path.stat().st_size).encode() if path.suffix == ".tar" else path.read_bytes()
        digest.update(f"{path.relative_to(folder)}\0{len(content)}\0".encode() + content)
    return digest.hexdigest()[:16]


@dataclass(frozen=True)
class SampleReader(Dataset):
    """Reads and decodes samples; one that must not be scored becomes a `Skipped` or a `DataError`."""

    samples: Sequence[StoredSample]
    transform: Callable[[Image.Image], Tensor]
    spec: SampleFormat

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, position: int) -> dict[str, Any] | Skipped | DataError:
        stored = self.samples[position]
        try:
            content, sample = parse_sample(stored.read(), self.spec, str(stored))
        except DataError as error:  # returned, so that the worker's traceback stays out of the message
            return error
        try:
            image: Image.Image = Image.open(io.BytesIO(content))
            image.load()
            image = image.convert("RGB") if self.spec.convert_first else image
        except Exception as error:  # decoders raise anything, even struct.error and SyntaxError
            return Skipped(str(stored), stored.key, f"the image does not decode ({error})")
        return {"key": stored.key, "image": self.transform(image), **sample}


def parse_sample(fields: dict[str, bytes], spec: SampleFormat, where: str) -> tuple[bytes, dict[str, Any]]:
    """Return the image file of a sample, and those of ``label``, ``metadata`` and ``captions`` that ``spec`` asks for.

    Raises:
        DataError: if one of them is missing or wrong; the message begins with ``where``.
    """
    extension = next((extension for extension in IMAGE_EXTENSIONS if extension in fields), None)
    if extension is None:
        raise DataError(f"{where}: no image, expected one of {', '.join(IMAGE_EXTENSIONS)}, found {sorted(fields)}.")
    sample: dict[str, Any] = {}
    if spec.num_classes is not None:
        sample["label"] = _parse_label(_field(fields, "cls", where), spec.num_classes, where)
    if spec.metadata_columns:
        sample["metadata"] = _parse_metadata(_field(fields, "npy", where), spec.metadata_columns, where)
    if spec.captions:
        lines = _field(fields, "txt", where).decode("utf-8", errors="replace").splitlines()
        sample["captions"] = [line.strip() for line in lines if line.strip()]
        if not sample["captions"]:
            raise DataError(f"{where}: no caption in its .txt, expected one per line.")
    return fields[extension], sample


def _field(fields: dict[str, bytes], extension: str, where: str) -> bytes:
    if extension not in fields:
        raise DataError(f"{where}: no .{extension} file, found {sorted(fields)}.")
    return fields[extension]


def _parse_label(content: bytes, num_classes: int, where: str) -> int:
    try:
        label = int(content)
    except ValueError:
        raise DataError(f"{where}: the label (.cls) is {content[:20]!r}, expected a number.") from None
    if not 0 <= label < num_classes:
        raise DataError(f"{where}: label {label} is outside the {num_classes} classes of {CLASSNAMES_FILE}.")
    return label


def _parse_metadata(content: bytes, columns: int, where: str) -> np.ndarray:
    try:
        values = np.load(io.BytesIO(content), allow_pickle=False)
    except (ValueError, EOFError, OSError) as error:
        raise DataError(f"{where}: the metadata (.npy) cannot be read ({error}).") from None
    if values.shape != (columns,) or not np.issubdtype(values.dtype, np.integer):
        raise DataError(
            f"{where}: metadata (.npy) of shape {values.shape}, {values.dtype}; expected {columns} integers."
        )
    if values.min() < 0:
        raise DataError(f"{where}: metadata (.npy) {values.tolist()} has negative group numbers.")
    return values.astype(np.int64)


def collate(found: Sequence[dict[str, Any] | Skipped | DataError]) -> Samples | DataError:
    """Make a batch of what `SampleReader` returns, or return its first error."""
    if errors := [entry for entry in found if isinstance(entry, DataError)]:
        return errors[0]
    samples = [entry for entry in found if isinstance(entry, dict)]
    names = [name for name in ("image", "label", "metadata") if samples and name in samples[0]]
    return Samples(
        [sample["key"] for sample in samples],
        {name: torch.stack([torch.as_tensor(sample[name]) for sample in samples]) for name in names},
        [sample.get("captions", []) for sample in samples],
        [entry for entry in found if isinstance(entry, Skipped)],
    )
