"""The list of tasks equals DataComp's published list."""

from openclip_ext.evaluation.tasks import GROUPS, TASKS, select_tasks


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
