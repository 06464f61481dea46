"""The 40 tasks of DataComp's evaluation (Gadre et al., 2023).

DataComp's average is over the 38 tasks that have a main metric.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from openclip_ext.cli.options import nearest


@dataclass(frozen=True)
class Task:
    """An evaluation task."""

    key: str
    name: str
    size: int  # number of scored items: images, or instances for WinoGAViL
    classes: int | None = None  # number of entries in ``classnames.txt``, if DataComp states it
    main_metric: str | None = "acc1"  # the metric in DataComp's average; None means that the average excludes the task
    kind: str = "classification"  # selects the evaluation function, see ``openclip_ext/evaluation/runner.py``
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

TASKS: dict[str, Task] = {
    task.key: task
    for task in (
        Task("vtab/caltech101", "Caltech-101", 6085, 102, "mean_per_class_recall"),
        Task("cifar10", "CIFAR-10", 10000, 10),
        Task("vtab/cifar100", "CIFAR-100", 10000, 100),
        Task("vtab/clevr_count_all", "CLEVR Counts", 15000, 8),
        Task("vtab/clevr_closest_object_distance", "CLEVR Distance", 15000, 6),
        Task("country211", "Country211", 21100, 211),
        Task("vtab/dtd", "Describable Textures", 1880, 47),
        Task("vtab/eurosat", "EuroSAT", 5400, 10),
        Task("fgvc_aircraft", "FGVC Aircraft", 3333, 100, "mean_per_class_recall"),
        Task("food101", "Food-101", 25250, 101),
        Task("gtsrb", "GTSRB", 12630, 43),
        Task("imagenet1k", "ImageNet 1k", 50000, 1000),
        Task("imagenet_sketch", "ImageNet Sketch", 50889, 1000),
        Task("imagenetv2", "ImageNet v2", 10000, 1000),
        Task("imagenet-a", "ImageNet-A", 7500, 200),
        Task("imagenet-o", "ImageNet-O", 2000, 200),
        Task("imagenet-r", "ImageNet-R", 30000, 200),
        Task("vtab/kitti_closest_vehicle_distance", "KITTI Vehicle Distance", 711, 4),
        Task("mnist", "MNIST", 10000, 10),
        Task("objectnet", "ObjectNet", 18574, 113),
        Task("vtab/flowers", "Oxford Flowers-102", 6149, 102, "mean_per_class_recall"),
        Task("vtab/pets", "Oxford-IIIT Pet", 3669, 37, "mean_per_class_recall"),
        Task("voc2007", "Pascal VOC 2007", 14976, 20),
        Task("vtab/pcam", "PatchCamelyon", 32768, 2),
        Task("renderedsst2", "Rendered SST2", 1821, 2),
        Task("vtab/resisc45", "RESISC45", 6300, 45),
        Task("cars", "Stanford Cars", 8041, 196),
        Task("stl10", "STL-10", 8000, 10),
        Task("sun397", "SUN397", 108754, 397),
        Task("vtab/svhn", "SVHN", 26032, 10),
        Task(FLICKR, "Flickr", 1000, None, "mean_recall@1", "retrieval"),
        Task(MSCOCO, "MSCOCO", 5000, None, "mean_recall@1", "retrieval"),
        Task(WINOGAVIL, "WinoGAViL", 3563, None, "jaccard_score_10-12", "winogavil"),
        Task("wilds/iwildcam", "iWildCam", 42791, 182, "F1-macro_all", "iwildcam", _IWILDCAM_METADATA),
        Task("wilds/camelyon17", "Camelyon17", 85054, 2, "acc1", "camelyon17", ("hospital", "slide", "y")),
        Task("wilds/fmow", "FMoW", 22108, 62, "acc_worst_region", "fmow", ("region", "year", "y")),
        Task("fairness/dollar_street", "Dollar Street", 3503, 58, "acc_top5_wg", "dollar_street", _INCOME_METADATA),
        Task("fairness/geode", "GeoDE", 12488, 40, "acc_wg", "geode", ("region", "country")),
        Task("fairness/fairface", "FairFace", 10954, None, None, "faces", FACE_METADATA),
        Task("fairness/utkface", "UTKFace", 23703, None, None, "faces", FACE_METADATA),
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


def select_tasks(names: Sequence[str] | None) -> list[Task]:
    """Return the tasks with these names in the order of `TASKS`, each once. None means all 40 tasks.

    A name is a key (``vtab/pets``), a task name (``Oxford-IIIT Pet``), a folder (``wds_vtab-pets_test``) or a suite
    (``imagenet``, ``quick``, ...).
    """
    known = {alias: (key,) for key, task in TASKS.items() for alias in (key, task.name, task.folder)} | SUITES
    wanted = set() if names else set(TASKS)
    for name in names or ():
        if name not in known:
            hint = f"keys such as imagenet1k or vtab/pets, or {', '.join(SUITES)}"
            raise ValueError(f"There is no task {name!r} (--tasks takes {hint}){nearest(name, known)}")
        wanted.update(known[name])
    return [task for key, task in TASKS.items() if key in wanted]
