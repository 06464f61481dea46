"""The 40 tasks of DataComp's evaluation (Gadre et al., 2023).

DataComp's average is over the 38 tasks that have a main metric.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from openclip_ext.cli.options import nearest

# Prefix of the metric names of DataComp's tasks and averages during training.
SUITE_PREFIX = "datacomp/"


@dataclass(frozen=True)
class Entry:
    """An entry of DataComp's list of tasks; `open_tasks.datacomp_task` returns the task itself."""

    key: str
    name: str
    size: int  # number of scored items: images, or instances for WinoGAViL
    classes: int | None = None  # number of entries in ``classnames.txt``, if DataComp states it
    main_metric: str | None = "acc1"  # the metric in DataComp's average; None means that the average excludes the task
    kind: str = "classification"  # or ``retrieval``, ``winogavil`` or ``faces``
    metadata: tuple[str, ...] = ()  # names of the columns of each sample's ``.npy``

    @property
    def folder(self) -> str:
        """Name of the data set's folder. A prefix ``fairness/`` is removed; other prefixes are part of the name."""
        return f"wds_{self.key.removeprefix('fairness/').replace('/', '-')}_test"


FACE_METADATA = ("age", "gender", "race", "race_binary")
_IWILDCAM_METADATA = ("location", "sequence", "year", "month", "day", "hour", "minute", "second", "y")
_INCOME_METADATA = ("income_ds", "income_meta", "region")
FLICKR = "retrieval/flickr_1k_test_image_text_retrieval"
MSCOCO = "retrieval/mscoco_2014_5k_test_image_text_retrieval"
WINOGAVIL = "misc/winogavil"

TASKS: dict[str, Entry] = {
    task.key: task
    for task in (
        Entry("vtab/caltech101", "Caltech-101", 6085, 102, "mean_per_class_recall"),
        Entry("cifar10", "CIFAR-10", 10000, 10),
        Entry("vtab/cifar100", "CIFAR-100", 10000, 100),
        Entry("vtab/clevr_count_all", "CLEVR Counts", 15000, 8),
        Entry("vtab/clevr_closest_object_distance", "CLEVR Distance", 15000, 6),
        Entry("country211", "Country211", 21100, 211),
        Entry("vtab/dtd", "Describable Textures", 1880, 47),
        Entry("vtab/eurosat", "EuroSAT", 5400, 10),
        Entry("fgvc_aircraft", "FGVC Aircraft", 3333, 100, "mean_per_class_recall"),
        Entry("food101", "Food-101", 25250, 101),
        Entry("gtsrb", "GTSRB", 12630, 43),
        Entry("imagenet1k", "ImageNet 1k", 50000, 1000),
        Entry("imagenet_sketch", "ImageNet Sketch", 50889, 1000),
        Entry("imagenetv2", "ImageNet v2", 10000, 1000),
        Entry("imagenet-a", "ImageNet-A", 7500, 200),
        Entry("imagenet-o", "ImageNet-O", 2000, 200),
        Entry("imagenet-r", "ImageNet-R", 30000, 200),
        Entry("vtab/kitti_closest_vehicle_distance", "KITTI Vehicle Distance", 711, 4),
        Entry("mnist", "MNIST", 10000, 10),
        Entry("objectnet", "ObjectNet", 18574, 113),
        Entry("vtab/flowers", "Oxford Flowers-102", 6149, 102, "mean_per_class_recall"),
        Entry("vtab/pets", "Oxford-IIIT Pet", 3669, 37, "mean_per_class_recall"),
        Entry("voc2007", "Pascal VOC 2007", 14976, 20),
        Entry("vtab/pcam", "PatchCamelyon", 32768, 2),
        Entry("renderedsst2", "Rendered SST2", 1821, 2),
        Entry("vtab/resisc45", "RESISC45", 6300, 45),
        Entry("cars", "Stanford Cars", 8041, 196),
        Entry("stl10", "STL-10", 8000, 10),
        Entry("sun397", "SUN397", 108754, 397),
        Entry("vtab/svhn", "SVHN", 26032, 10),
        Entry(FLICKR, "Flickr", 1000, None, "mean_recall@1", "retrieval"),
        Entry(MSCOCO, "MSCOCO", 5000, None, "mean_recall@1", "retrieval"),
        Entry(WINOGAVIL, "WinoGAViL", 3563, None, "jaccard_score_10-12", "winogavil"),
        Entry("wilds/iwildcam", "iWildCam", 42791, 182, "F1-macro_all", "classification", _IWILDCAM_METADATA),
        Entry("wilds/camelyon17", "Camelyon17", 85054, 2, "acc1", "classification", ("hospital", "slide", "y")),
        Entry("wilds/fmow", "FMoW", 22108, 62, "acc_worst_region", "classification", ("region", "year", "y")),
        Entry("fairness/dollar_street", "Dollar Street", 3503, 58, "acc_top5_wg", "classification", _INCOME_METADATA),
        Entry("fairness/geode", "GeoDE", 12488, 40, "acc_wg", "classification", ("region", "country")),
        Entry("fairness/fairface", "FairFace", 10954, None, None, "faces", FACE_METADATA),
        Entry("fairness/utkface", "UTKFace", 23703, None, None, "faces", FACE_METADATA),
    )
}

# Keys of the tasks in DataComp's average.
AVERAGED: tuple[str, ...] = tuple(key for key, task in TASKS.items() if task.main_metric is not None)

_IMAGENET_SHIFTS = ("imagenet_sketch", "imagenetv2", "imagenet-a", "imagenet-o", "imagenet-r", "objectnet")

# A group's title in the summary -> keys of its tasks. DataComp's aggregate_scores.py defines the groups "VTAB" and
# "ImageNet dist. shifts".
GROUPS: dict[str, tuple[str, ...]] = {
    "DataComp average (38)": AVERAGED,
    "ImageNet 1k": ("imagenet1k",),
    "ImageNet & variants (7)": ("imagenet1k", *_IMAGENET_SHIFTS),
    "ImageNet dist. shifts (6)": _IMAGENET_SHIFTS,
    "VTAB (13)": (*(key for key in TASKS if key.startswith("vtab/")), "sun397"),
    "Retrieval, DataComp (Flickr, MSCOCO, WinoGAViL)": (FLICKR, MSCOCO, WINOGAVIL),
    "Retrieval, NeuCLIP and AmorLIP (Flickr, MSCOCO)": (FLICKR, MSCOCO),
    "WILDS (3)": tuple(key for key in TASKS if key.startswith("wilds/")),
    "Fairness (Dollar Street, GeoDE)": ("fairness/dollar_street", "fairness/geode"),
}

# Suite (a name that --tasks accepts) -> keys of its tasks. "quick" (40,754 images) is for evaluation during training.
SUITES: dict[str, tuple[str, ...]] = {
    "full": tuple(TASKS),
    "quick": ("imagenetv2", "cifar10", "vtab/cifar100", "vtab/caltech101", "vtab/pets", FLICKR),
    "imagenet": GROUPS["ImageNet & variants (7)"],
    "vtab": GROUPS["VTAB (13)"],
    "retrieval": (FLICKR, MSCOCO, WINOGAVIL),
    "wilds": GROUPS["WILDS (3)"],
    "fairness": tuple(key for key in TASKS if key.startswith("fairness/")),
}


def select_tasks(names: Sequence[str] | None) -> list[Entry]:
    """Return the tasks with these names in the order of `TASKS`, each once. None means all 40 tasks.

    A name is a key (``vtab/pets``), a task name (``Oxford-IIIT Pet``), a folder (``wds_vtab-pets_test``) or a suite
    (``imagenet``, ``quick``, ...).
    """
    known = {alias: (key,) for key, task in TASKS.items() for alias in (key, task.name, task.folder)} | SUITES
    wanted = set() if names else set(TASKS)
    for name in names or ():
        if name not in known:
            hint = f"keys such as imagenet1k or vtab/pets, {', '.join(SUITES)}, or the path of your own data"
            raise ValueError(f"There is no task {name!r} (--tasks takes {hint}){nearest(name, known)}")
        wanted.update(known[name])
    return [task for key, task in TASKS.items() if key in wanted]
