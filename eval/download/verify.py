"""``--verify``: what is there, what is missing, what is broken; without a network."""

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from eval.data import (
    IMAGE_EXTENSIONS,
    DataError,
    MissingDataError,
    UniqueKeys,
    find_shards,
    read_classes,
    read_shard,
    task_folder,
)
from eval.download.convert import INSTANCES_NAME
from eval.download.fetch import HUB_FOLDER
from eval.download.manifest import Manifest
from eval.download.sources import SOURCE_FOLDER
from eval.tasks import Task

OK, UNPROVEN, MISSING, INCOMPLETE, BROKEN = "ok", "ok, no checksums", "missing", "incomplete", "broken"


@dataclass(frozen=True)
class Verdict:
    """What one data set folder holds.

    Attributes:
        task: whose data it is.
        status: `OK`; `UNPROVEN` (whole and of the right size, but not fetched by this tool, so there is nothing to
            compare the bytes with); `MISSING`; `INCOMPLETE` (a download was interrupted); `BROKEN`.
        samples: scored items found, None where they could not be counted.
        problems: what is wrong, one entry a fault.
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
    """Check one data set: checksums where they are known, then every tar to its end, sample by sample.

    Args:
        data_dir: folder of all data sets.
        task: whose data to check.
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
    """Read a data set to its end and count what is scored: images, or instances for WinoGAViL.

    Raises:
        DataError: for the first thing that would make a score wrong.
    """
    shards = find_shards(folder)
    if task.kind == "winogavil":
        return _count_instances(folder / INSTANCES_NAME, set(_check_samples(shards, ())))
    if task.kind == "retrieval":
        return len(_check_samples(shards, ("txt",)))
    classnames, _ = read_classes(folder, task, any_size)
    fields = (() if task.kind == "faces" else ("cls",)) + (("npy",) if task.metadata else ())

    def check_label(where: str, content: dict[str, bytes]) -> None:
        if "cls" in fields and not content["cls"].strip().isdigit():
            raise DataError(f"{where}: the label (.cls) is {content['cls'][:20]!r}, expected a number")
        if "cls" in fields and int(content["cls"]) >= len(classnames):
            raise DataError(f"{where}: label {int(content['cls'])} is outside the {len(classnames)} classes")

    return len(_check_samples(shards, fields, check_label))


def _check_samples(
    shards: Iterable[Path],
    fields: tuple[str, ...],
    check: Callable[[str, dict[str, bytes]], None] = lambda where, content: None,
) -> list[str]:
    """The keys of all samples, after every sample was found to have an image and the other fields."""
    keys: list[str] = []
    unique = UniqueKeys()
    for shard in shards:
        before = len(keys)
        for key, content in read_shard(shard):
            where = f"{shard.name}: {key}"
            if not any(extension in content for extension in IMAGE_EXTENSIONS):
                raise DataError(f"{where}: no image, found {sorted(content)}")
            missing = [field for field in fields if field not in content]
            if missing:
                raise DataError(f"{where}: no .{', .'.join(missing)} file, found {sorted(content)}")
            check(where, content)
            unique.add(key, shard.name)
            keys.append(key)
        if len(keys) == before:
            raise DataError(f"{shard.name} holds no samples")
    return keys


def _count_instances(path: Path, keys: set[str]) -> int:
    if not path.is_file():
        raise DataError(f"{path.name} is missing")
    count = 0
    for count, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            instance = json.loads(line)
            named = {*instance["candidates"], *instance["associations"]}
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(f"{path.name}: line {count} is no instance ({error!r})") from None
        if not named <= keys:
            raise DataError(f"{path.name}: line {count} names images that are in no tar: {sorted(named - keys)[:3]}")
    return count
