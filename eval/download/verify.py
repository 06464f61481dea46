"""``--verify``: which data sets are whole, missing or broken; works without a network."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from ..data import (
    DataError,
    MissingDataError,
    SampleFormat,
    UniqueKeys,
    find_shards,
    parse_sample,
    read_classes,
    read_shard,
    task_folder,
)
from ..retrieval import INSTANCES_FILE, read_instances
from ..tasks import Task
from .fetch import HUB_FOLDER
from .manifest import Manifest
from .sources import SOURCE_FOLDER

OK, UNPROVEN, MISSING, INCOMPLETE, BROKEN = "ok", "ok, no checksums", "missing", "incomplete", "broken"


@dataclass(frozen=True)
class Verdict:
    """State of one data set folder.

    Attributes:
        task: the task that needs the data.
        status: `OK`; `UNPROVEN` (whole and of the right size, but not fetched by this tool, so without checksums);
            `MISSING`; `INCOMPLETE` (a download was interrupted); `BROKEN`.
        samples: scored items found, None if they could not be counted.
        problems: one entry a fault.
    """

    task: Task
    status: str
    samples: int | None = None
    problems: tuple[str, ...] = ()

    @property
    def usable(self) -> bool:
        """Whether the task can be scored."""
        return self.status in (OK, UNPROVEN)


def verify_set(data_dir: Path, task: Task, any_size: bool = False) -> Verdict:
    """Check one data set: its checksums if they are known, then every tar to its end, sample by sample.

    Args:
        data_dir: folder of all data sets.
        task: the task whose data to check.
        any_size: accept numbers of samples and classes other than DataComp's.
    """
    try:
        folder = task_folder(task, data_dir)
    except MissingDataError:
        return Verdict(task, MISSING)
    try:
        manifest = Manifest.load(folder)
    except ValueError as error:
        return Verdict(task, BROKEN, problems=(str(error),))
    if manifest is None and any((folder / name).is_dir() for name in (HUB_FOLDER, SOURCE_FOLDER)):
        return Verdict(task, INCOMPLETE)
    problems = manifest.problems(folder) if manifest is not None else []
    samples = None
    try:
        samples = count_items(folder, task, any_size)
        if samples != task.size and not any_size:
            problems.append(f"{samples:,} samples, DataComp's has {task.size:,}")
    except DataError as error:
        problems.append(str(error))
    if problems:
        return Verdict(task, BROKEN, samples, tuple(problems))
    return Verdict(task, OK if manifest is not None else UNPROVEN, samples)


def count_items(folder: Path, task: Task, any_size: bool = False) -> int:
    """Read a data set to its end and count the scored items: images, or instances for WinoGAViL.

    Raises:
        DataError: for the first thing that would make a score wrong.
    """
    shards = find_shards(folder)
    if task.kind == "winogavil":
        return _count_instances(folder, _check_samples(shards, SampleFormat()))
    if task.kind == "retrieval":
        return len(_check_samples(shards, SampleFormat(captions=True)))
    classnames, _ = read_classes(folder, task, any_size)
    labels = None if task.kind == "faces" else len(classnames)
    return len(_check_samples(shards, SampleFormat(labels, len(task.metadata))))


def _check_samples(shards: Iterable[Path], spec: SampleFormat) -> set[str]:
    """The keys of all samples, after every sample was found to be whole."""
    keys: set[str] = set()
    unique = UniqueKeys()
    for shard in shards:
        before = len(keys)
        for key, fields in read_shard(shard):
            parse_sample(fields, spec, f"{shard.name}: {key}")
            unique.add(key, shard.name)
            keys.add(key)
        if len(keys) == before:
            raise DataError(f"{shard.name} holds no samples")
    return keys


def _count_instances(folder: Path, keys: set[str]) -> int:
    instances = read_instances(folder)
    for number, instance in enumerate(instances, start=1):
        unknown = sorted(set(instance.candidates) - keys)
        if unknown:
            raise DataError(f"{INSTANCES_FILE}: line {number} names images that are in no tar: {unknown[:3]}")
    return len(instances)
