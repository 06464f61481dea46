"""The list of tasks equals DataComp's published list."""

from openclip_ext.evaluation.tasks import FLICKR, GROUPS, MSCOCO, SUITES, TASKS, WINOGAVIL, select_tasks


def test_folders_drop_only_the_fairness_prefix():
    assert TASKS["fairness/geode"].folder == "wds_geode_test"
    assert TASKS["vtab/caltech101"].folder == "wds_vtab-caltech101_test"
    assert len({task.folder for task in TASKS.values()}) == 40


def test_groups_have_the_sizes_their_names_say():
    assert [len(keys) for keys in GROUPS.values()] == [38, 1, 7, 6, 13, 3, 2, 3, 2]
    assert all(key in TASKS for keys in GROUPS.values() for key in keys)


def test_selection_takes_keys_names_folders_and_suites():
    assert len(select_tasks(None)) == 40
    chosen = select_tasks(["wilds", "Oxford-IIIT Pet", "vtab/pets", "wds_geode_test"])
    keys = ["vtab/pets", "wilds/iwildcam", "wilds/camelyon17", "wilds/fmow", "fairness/geode"]
    assert [task.key for task in chosen] == keys


def test_sizes_metrics_columns_and_variants_are_those_of_datacomp():
    """The totals are sums over DataComp's list, so a change of one task's size or classes changes a total."""
    assert sum(task.size for task in TASKS.values()) == 732026
    assert sum(task.classes or 0 for task in TASKS.values()) == 5630
    recalls = ("vtab/caltech101", "fgvc_aircraft", "vtab/flowers", "vtab/pets")
    assert {key: task.main_metric for key, task in TASKS.items() if task.main_metric != "acc1"} == {
        **dict.fromkeys(recalls, "mean_per_class_recall"),
        **dict.fromkeys((FLICKR, MSCOCO), "mean_recall@1"),
        WINOGAVIL: "jaccard_score_10-12",
        "wilds/iwildcam": "F1-macro_all",
        "wilds/fmow": "acc_worst_region",
        "fairness/dollar_street": "acc_top5_wg",
        "fairness/geode": "acc_wg",
        **dict.fromkeys(("fairness/fairface", "fairness/utkface"), None),
    }
    assert {key: " ".join(task.metadata) for key, task in TASKS.items() if task.metadata} == {
        "wilds/iwildcam": "location sequence year month day hour minute second y",
        "wilds/camelyon17": "hospital slide y",
        "wilds/fmow": "region year y",
        "fairness/dollar_street": "income_ds income_meta region",
        "fairness/geode": "region country",
        **dict.fromkeys(("fairness/fairface", "fairness/utkface"), "age gender race race_binary"),
    }
    shifts = ("imagenet_sketch", "imagenetv2", "imagenet-a", "imagenet-o", "imagenet-r", "objectnet")
    assert GROUPS["ImageNet & variants (7)"] == ("imagenet1k", *shifts)
    assert sum(TASKS[key].size for key in SUITES["quick"]) == 40754
