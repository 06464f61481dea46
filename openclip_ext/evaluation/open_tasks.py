"""Open tasks: DataComp's by their entry, ImageNet's folders, and a user's own data by their path.

A user's task is a folder with one folder of images per class, a folder in DataComp's layout, a table of images and labels, or
image-caption pairs in any format of training data.
"""

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import open_clip
from timm.data import ImageNetInfo
from torch import Tensor

from openclip_ext.cli.messages import get_logger
from openclip_ext.data.loader.build import build_source, data_files, detecting_columns, stamped, with_own_columns
from openclip_ext.data.sources.keys import LABEL_COLUMNS
from openclip_ext.data.sources.rows import RowSource
from openclip_ext.data.sources.source import BadDataError, Source
from openclip_ext.data.sources.spec import DataSpec, is_saved
from openclip_ext.evaluation import metrics
from openclip_ext.evaluation.encoder import Encoder
from openclip_ext.evaluation.metrics import Answers, Metrics
from openclip_ext.evaluation.results import averages, config_digest
from openclip_ext.evaluation.samples import (
    CLASSNAMES_FILE,
    INSTANCES_FILE,
    TEMPLATES_FILE,
    DataError,
    Labeled,
    SampleFormat,
    class_folders,
    read_classes,
    read_lines,
    read_templates,
    shard_samples,
    source_samples,
)
from openclip_ext.evaluation.scoring import Associations, CaptionSets, Classification, Faces, Retrieval, Task
from openclip_ext.evaluation.tasks import Entry, select_tasks

logger = get_logger(__name__)

DEFAULT_TEMPLATE = "a photo of a {c}"
FORMATS = (
    "expected a folder with one folder of images per class, a folder in DataComp's layout, a table with a column of labels "
    f"({', '.join(LABEL_COLUMNS)}), or image-caption pairs in a format of --train-data"
)

# Key of a task with metrics of its own -> their function. For tasks scored by group: prefix of the group metrics, k of the
# top-k accuracy, and the metadata column that defines the groups.
_METRICS: dict[str, Callable[[Answers, Sequence[str]], Metrics]] = {
    "wilds/iwildcam": metrics.iwildcam_metrics,
    "wilds/fmow": metrics.fmow_metrics,
}
_GROUPED = {
    "wilds/camelyon17": ("acc", 1, "slide"),
    "fairness/dollar_street": ("acc_top5", 5, "income_ds"),
    "fairness/geode": ("acc", 1, "region"),
}


def _more_metrics(answers: Answers, key: str, columns: Sequence[str]) -> Metrics:
    """Return the metrics that one of DataComp's tasks has in addition to those of classification."""
    if key in _GROUPED:
        name, top, group = _GROUPED[key]
        return metrics.group_metrics(name, answers.ranks < top, answers.metadata, columns, [group])
    return _METRICS[key](answers, columns) if key in _METRICS else {}


def datacomp_task(entry: Entry, data_dir: str | Path, any_size: bool = False) -> Task:
    """Return the task of an entry of DataComp's list. ``any_size``: whether the data's size may differ from DataComp's."""
    folder = Path(data_dir) / entry.folder
    size = None if any_size else entry.size
    common: dict[str, Any] = {"name": entry.name, "path": folder, "main_metric": entry.main_metric, "size": size}
    kinds: dict[str, type[Task]] = {"faces": Faces, "retrieval": CaptionSets, "winogavil": Associations}
    if entry.kind in kinds:
        return kinds[entry.kind](**common)
    more = partial(_more_metrics, key=entry.key, columns=entry.metadata)
    read = partial(_read_labeled, folder, None if any_size else entry.classes, len(entry.metadata))
    return Classification(read=read, more=more, **common)


def _read_labeled(folder: Path, classes: int | None = None, metadata_columns: int = 0) -> Labeled:
    classnames, templates = read_classes(folder, classes)
    return Labeled(shard_samples(folder, SampleFormat(len(classnames), metadata_columns)), classnames, templates)


@dataclass(frozen=True)
class Suite:
    """Tasks of DataComp, by key, that are scored together during training."""

    tasks: Mapping[str, Task]
    name: str = "datacomp"

    def score(self, encoder: Encoder) -> dict[str, float]:
        """Return main metrics as ``datacomp/KEY``, and averages of groups without missing tasks as ``datacomp/average/TITLE``.

        A failed task is logged and excluded.
        """
        scores = {}
        for key, task in self.tasks.items():
            try:
                value = task.score(encoder).metrics["main_metric"]
            except Exception as error:
                logger.error(f"{task.name} failed and is excluded: {error}")
                continue
            if value is not None:  # a metric may be undefined: WinoGAViL's needs instances with 10 or 12 candidates
                scores[key] = value
        complete = {f"average/{title}": mean for title, (mean, _) in averages(scores).items() if mean is not None}
        return {f"{self.name}/{key}": value for key, value in {**scores, **complete}.items()}


def datacomp_suite(suite: str, data_dir: str | Path, any_size: bool = False) -> Suite:
    """Return the tasks of a suite that have a main metric and data.

    Args:
        suite: ``quick`` (six tasks, 40,754 images), ``full`` (the 38 tasks with a main metric), or another key of `SUITES`.
            Tasks without data are skipped and logged.
        data_dir: Folder with the ``wds_*_test`` folders.
        any_size: Whether to score data whose size differs from DataComp's.

    Raises:
        ValueError: The suite is unknown, or ``data_dir`` has no data set of the suite.
    """
    wanted = [entry for entry in select_tasks([suite]) if entry.main_metric is not None]
    found = {
        entry.key: datacomp_task(entry, data_dir, any_size)
        for entry in wanted
        if (Path(data_dir) / entry.folder).is_dir()
    }
    missing = ", ".join(entry.name for entry in wanted if entry.key not in found)
    if not found:
        raise ValueError(f"{data_dir} has no data set of the suite {suite!r}: expected one or more of {missing}.")
    if missing:
        logger.warning(f"The suite {suite!r} is incomplete in {data_dir}. Missing: {missing}.")
    return Suite(found)


def own_task(
    place: str | Path, template: str | None = None, pairs: DataSpec | None = None, labels_first: bool = False
) -> Task:
    """Return the task of a user's data.

    Args:
        place: A folder or a file in one of the formats of :data:`FORMATS`, or a pattern or URL of shards.
        template: Prompt with ``{}`` for the class name. None means the data's ``zeroshot_classification_templates.txt``, or
            else the ``caption_template`` of ``pairs``, or else :data:`DEFAULT_TEMPLATE`.
        pairs: How to read tables and image-caption pairs. If a table lacks the columns, its own are detected. None means with
            default keys and columns.
        labels_first: Whether a table with captions and labels is a classification. By default, it is a retrieval task.

    Raises:
        DataError: The path does not exist, or its format is unknown.
    """
    path = Path(place)
    name = path.stem if path.is_file() else path.resolve().name if path.is_dir() else str(place)
    spec = DataSpec(str(place)) if pairs is None else pairs
    has_prompts = ((path if path.is_dir() else path.parent) / TEMPLATES_FILE).is_file()
    if template is None and not has_prompts and spec.caption_template != DataSpec.caption_template:
        template = spec.caption_template
    if (path / "test").is_dir() and (path / "test" / "nshards.txt").is_file():
        return _in_datacomp_layout(path, name)
    if path.is_dir() and not is_saved(str(path)) and not any(path.glob("*.tar*")):
        return Classification(name=name, path=path, template=template, read=partial(read_class_folders, path, template))
    if not path.exists() and not any(mark in str(place) for mark in ("*", "{", "::", "://")):
        raise DataError(f"{path} not found: {FORMATS}")
    if (labels := _label_source(spec, labels_first)) is not None:
        # Training scores the task in each epoch, but reading the labels reads all rows.
        read_once = cache(partial(_read_table, path, labels, template))

        def digest() -> str:
            return config_digest(stamped([*labels.files(), str(path.parent / TEMPLATES_FILE)]))

        return Classification(name=name, path=path, template=template, read=read_once, digest=digest)
    return retrieval(name, spec)


def retrieval(name: str, spec: DataSpec) -> Retrieval:
    """Return the retrieval task of a set of image-caption pairs."""
    path, digest = Path(str(spec.source)), partial(_digest_of_pairs, spec)
    return Retrieval(name=name, path=path, batches=partial(_batches, spec), digest=digest)


def _batches(spec: DataSpec, encoder: Encoder) -> Iterable[Mapping[str, Tensor]]:
    """Return the batches of a data set; raise DataError, which is reported without a traceback, if it cannot be read."""
    try:
        return encoder.pairs(spec)
    except (ValueError, OSError, BadDataError) as error:
        raise DataError(str(error)) from error


def _digest_of_pairs(spec: DataSpec) -> str:
    """Return a digest of the files of a data set and of how it is read; an empty text for data that cannot be read."""
    with contextlib.suppress(ValueError, OSError):
        return config_digest([asdict(spec), with_own_columns(spec, data_files)])
    return ""


def _in_datacomp_layout(folder: Path, name: str) -> Task:
    kind_file = folder / "dataset_type.txt"
    if (folder / INSTANCES_FILE).is_file():
        return Associations(name=name, path=folder, main_metric="avg_jaccard_score")
    if kind_file.is_file() and kind_file.read_text().strip() == "retrieval":
        return CaptionSets(name=name, path=folder)
    return Classification(name=name, path=folder, read=partial(_read_labeled, folder))


def prompts(folder: Path, template: str | None) -> list[str]:
    """Return the prompt templates of own data, see :func:`own_task`."""
    if template is not None:
        if template.count("{}") != 1:
            raise DataError(f"--template {template!r}: expected {{}} for the class name")
        return [template.replace("{}", "{c}")]
    path = folder / TEMPLATES_FILE
    return read_templates(path) if path.is_file() else [DEFAULT_TEMPLATE]


def read_class_folders(folder: Path, template: str | None = None) -> Labeled:
    """Return the images of a folder with one folder per class.

    The folders' names are the class names, with spaces for underscores as in training. With ``classnames.txt``, a folder's
    name is a line of this file, apart from underscores and capitals, or a line's number (from 0). If no folder's name is a
    line, the lines follow the folders in alphabetical order, or in the order of their numbers.
    """
    path = folder / CLASSNAMES_FILE
    if not path.is_file():
        samples, names = class_folders(folder)
        return Labeled(samples, [name.replace("_", " ") for name in names], prompts(folder, template))
    lines = read_lines(path, "class names", are_labels=True)

    def numbered(names: list[str]) -> Mapping[str, int]:
        places = {_plain(line): place for place, line in reversed([*enumerate(lines)])}
        unknown = [name for name in names if _plain(name) not in places]
        if not unknown:
            return {name: lines.index(name) if name in lines else places[_plain(name)] for name in names}
        are_numbers = all(map(str.isdecimal, names))
        if are_numbers and max(map(int, names)) < len(lines):
            return {name: int(name) for name in names}
        if len(unknown) < len(names):  # the order of the lines is then not the order of the folders
            raise DataError(f"{path} has no line for the class folder {unknown[0]}. Add it, or rename the folder.")
        if len(names) != len(lines):
            raise DataError(
                f"{path}: expected a line for each of the {len(names)} class folders in {folder}, found {len(lines)}."
            )
        return {name: place for place, name in enumerate(sorted(names, key=int) if are_numbers else names)}

    samples, _ = class_folders(folder, numbered)
    return Labeled(samples, lines, prompts(folder, template))


def _plain(name: str) -> str:
    return name.replace("_", " ").casefold()


def _label_source(spec: DataSpec, labels_first: bool) -> RowSource | None:
    """Return a table whose captions are labels. None means that the data are no table, or not to be read by labels."""
    if spec.resolved_type not in ("csv", "table"):
        return None
    of_labels = *LABEL_COLUMNS, *map(str.title, LABEL_COLUMNS)
    for each in (spec, detecting_columns(spec)):
        columns = (*of_labels, each.csv_caption_key) if labels_first else (each.csv_caption_key, *of_labels)
        for column in columns:
            with contextlib.suppress(ValueError):
                source = build_source(replace(each, csv_caption_key=column, caption_template="{}"))
                assert isinstance(source, RowSource)
                return source if column in of_labels or source.has_classes else None
    return None  # the loader of pairs explains what is wrong with the table


def _read_table(path: Path, source: Source, template: str | None) -> Labeled:
    # The labels are read as if they were captions. An image's label is the place of its text among all texts.
    samples, classes = source_samples(path.name, source)
    return Labeled(samples, classes, prompts(path.parent, template))


# --- ImageNet in training ---------------------------------------------------------------------------------------------

# Possible names of the image folder inside --imagenet-v2: the name of OpenCLIP's reader, and the name in the archive.
_V2_FOLDERS = ("ImageNetV2-matched-frequency", "imagenetv2-matched-frequency-format-val")


def imagenet_task(name: str, folder: str) -> Classification:
    """Return OpenCLIP's zero-shot classification of ImageNet (``imagenet``) or ImageNet-V2 (``imagenetv2``).

    Folder names are WordNet ids (``n01440764``) or numbers (``0`` to ``999``). Raise DataError if they are not.
    """
    root = Path(folder)
    if name == "imagenetv2":
        root = next((root / inside for inside in _V2_FOLDERS if (root / inside).is_dir()), root)
    if not root.is_dir():
        raise DataError(f"{root} is not a folder")
    samples, _ = class_folders(root, imagenet_numbers)
    templates = [template("{c}") for template in open_clip.OPENAI_IMAGENET_TEMPLATES]
    labeled = Labeled(samples, open_clip.IMAGENET_CLASSNAMES, templates)
    return Classification(name=name, read=lambda: labeled, autocast=True)


def imagenet_numbers(names: list[str]) -> Mapping[str, int]:
    """Return the class number of each of ImageNet's folders; raise DataError if they are not ImageNet's."""
    synsets = {name: number for number, name in enumerate(ImageNetInfo().label_names())}
    numbers = {name: int(name) if name.isdecimal() else synsets.get(name, -1) for name in names}
    if sorted(numbers.values()) != sorted(synsets.values()):
        others = [name for name, number in numbers.items() if number not in synsets.values()] or names
        found = f"{len(names)} class folders, {', '.join(others[:1])} among them"
        raise DataError(f"expected ImageNet's 1000 class folders (n01440764, ... or 0 to 999), found {found}")
    return numbers
