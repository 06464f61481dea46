"""DataComp's command line: all 40 tasks, resuming, failed tasks, several processes, and results that DataComp can read."""

import io
import json
import os
import runpy
import shutil
import signal
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pandas as pd
import pytest
import torch

from openclip_ext.evaluation import datacomp
from openclip_ext.evaluation.report.runs import read_runs
from openclip_ext.evaluation.results import LOG_FILE, RESULTS_FILE, read_results
from openclip_ext.evaluation.samples import fingerprint
from openclip_ext.evaluation.scoring import Classification
from openclip_ext.evaluation.tasks import AVERAGED, GROUPS, TASKS, select_tasks
from tests.distributed.pool import FORKS, two_ranks
from tests.evaluation import datasets


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory) -> Path:
    """Return a folder with small data sets for all 40 tasks."""
    folder = tmp_path_factory.mktemp("data")
    for number, key in enumerate(TASKS):
        datasets.make_task(folder, key, count=12, seed=number)
    return folder


KITTI = "vtab/kitti_closest_vehicle_distance"  # 4 classes in DataComp, 10 here


def evaluate(
    folder: Path, data_dir: Path, *arguments: str, checkpoint: str = "epoch_1.pt", any_size: bool = True
) -> int:
    """Run the command in this process, with a checkpoint in ``folder``; return the exit status."""
    argv = ["--model", datasets.TINY_MODEL, "--checkpoint", str(folder / checkpoint), "--data-dir", str(data_dir)]
    return datacomp.main([*argv, "--workers", "0", *(["--allow-size-mismatch"] if any_size else []), *arguments])


def main_metrics(folder: Path) -> dict[str, float | None]:
    return {line["key"]: line["metrics"]["main_metric"] for line in read_results(folder / RESULTS_FILE)}


def aggregate(path: Path) -> dict[str, float]:
    """Read the main metrics by data set like DataComp's ``aggregate_scores.py``, which requires 38 rows with a main metric."""
    table = pd.read_json(path, lines=True)
    table = pd.concat([table.drop(columns="metrics"), table["metrics"].apply(pd.Series)], axis=1)
    table = table.dropna(subset=["main_metric"])
    assert len(table) == 38
    return dict(zip(table["dataset"], table["main_metric"], strict=True))


@pytest.fixture(scope="module")
def all_tasks(tiny_folder, data_dir, tmp_path_factory) -> tuple[Path, str, str]:
    """Evaluate all 40 tasks; return the folder of the results, the program's stdout, and its stderr (progress bars)."""
    folder = tmp_path_factory.mktemp("all")
    with redirect_stdout(io.StringIO()) as shown, redirect_stderr(io.StringIO()) as progress:
        assert evaluate(tiny_folder, data_dir, "--output-dir", str(folder)) == 0
    return folder, shown.getvalue(), progress.getvalue()


def test_all_40_tasks_in_a_file_that_datacomp_reads(all_tasks):
    folder, shown, progress = all_tasks
    lines = read_results(folder / RESULTS_FILE)
    assert {line["key"]: line["dataset"] for line in lines} == {key: task.name for key, task in TASKS.items()}
    assert "NaN" not in (folder / RESULTS_FILE).read_text()
    scores = aggregate(folder / RESULTS_FILE)
    assert set(scores) == {TASKS[key].name for key in AVERAGED}
    average = sum(scores.values()) / 38
    assert f"DataComp average (38): {average:.4f}" in shown
    vtab = sum(scores[TASKS[key].name] for key in GROUPS["VTAB (13)"]) / 13
    assert f"VTAB (13): {vtab:.4f}" in shown
    assert "Sizes of 40 data sets differ from DataComp's, so scores are not comparable" in shown
    assert "40/40" in progress, "expected a progress bar that counts tasks"
    summary = json.loads((folder / datacomp.SUMMARY_FILE).read_text())
    assert summary["averages"]["DataComp average (38)"]["value"] == pytest.approx(average)
    assert summary["problems"] == {}


def killed(argv: list[str], tasks: int) -> None:
    """Run the command, and kill this process by SIGKILL in the task after ``tasks`` tasks."""
    score, calls = Classification.score, iter(range(tasks))

    def score_or_die(task, encoder):
        if next(calls, None) is None:
            os.kill(os.getpid(), signal.SIGKILL)
        return score(task, encoder)

    with mock.patch.object(Classification, "score", score_or_die):
        datacomp.main(argv)


def test_a_killed_evaluation_evaluates_only_what_is_missing(
    tiny_folder, data_dir, tmp_path_factory, model_arguments, caplog
):
    tmp_path = tmp_path_factory.mktemp("out")

    def evaluated(*arguments: str) -> list[str]:
        caplog.clear()
        evaluate(tiny_folder, data_dir, "--output-dir", str(tmp_path), "--tasks", *arguments)
        return [message.partition(":")[0] for message in caplog.messages if "samples in" in message]

    argv = [
        *model_arguments,
        "--model-config",
        str(tiny_folder / f"{datasets.TINY_MODEL}.json"),
        "--allow-size-mismatch",
    ]
    argv += ["--data-dir", str(data_dir), "--output-dir", str(tmp_path), "--tasks", "cifar10", "mnist", "gtsrb"]
    (process := FORKS.Process(target=killed, args=(argv, 2))).start()
    process.join(timeout=120)
    assert process.exitcode == -signal.SIGKILL
    first = main_metrics(tmp_path)
    assert len(first) == 2
    # As if the program had been killed while it wrote a line. The incomplete line is ignored.
    with open(tmp_path / LOG_FILE, "a") as stream:
        stream.write('{"key": "stl10", "metr')
    assert evaluated("mnist", "cifar10", "gtsrb") == [
        TASKS[key].name for key in {"mnist", "cifar10", "gtsrb"} - {*first}
    ]
    assert main_metrics(tmp_path).items() > first.items()
    assert len((tmp_path / RESULTS_FILE).read_text().splitlines()) == 3
    log = (tmp_path / LOG_FILE).read_text()
    assert evaluated("mnist", "--overwrite") == ["MNIST"]
    assert (tmp_path / LOG_FILE).read_text().startswith(log), "lines are only appended"
    before = {path: path.stat().st_mtime_ns for path in [tmp_path, *tmp_path.iterdir()]}
    assert evaluated("gtsrb") == []
    read_runs([str(tmp_path)])
    changed = [path for path, changed_ns in before.items() if path.stat().st_mtime_ns != changed_ns]
    assert changed == [], "reading results must work in a read-only folder"


def test_never_another_models_numbers(tiny_folder, data_dir, tmp_path, capfd, caplog):
    tasks = ("--output-dir", str(tmp_path), "--tasks", "retrieval", "cifar10,mnist")
    assert evaluate(tiny_folder, data_dir, *tasks) == 0
    first = (tmp_path / RESULTS_FILE).read_text()
    shown = capfd.readouterr().out
    assert "DataComp average (38): partial, 5/38; missing: Caltech-101, CIFAR-100" in shown, "expected no average"
    assert "Retrieval, DataComp (Flickr, MSCOCO, WinoGAViL): 0." in shown
    summary = json.loads((tmp_path / datacomp.SUMMARY_FILE).read_text())["averages"]["DataComp average (38)"]
    assert (summary["value"], summary["missing"]) == (
        None,
        [key for key in AVERAGED if key not in main_metrics(tmp_path)],
    )
    refused = "has results with different {}"
    # With another activation, equal weights count as a different model.
    for arguments, checkpoint, message in (
        ((), "epoch_2.pt", refused.format("weights: give another --output-dir")),
        ((), "epoch_3.pt", "There is no checkpoint"),
        (("--force-quick-gelu",), "epoch_1.pt", refused.format("config")),
    ):
        caplog.clear()
        assert evaluate(tiny_folder, data_dir, *tasks, *arguments, checkpoint=checkpoint) == 2
        assert message in caplog.text and (tmp_path / RESULTS_FILE).read_text() == first
    # The lines of DataComp's own harness do not record which model was evaluated.
    (tmp_path / LOG_FILE).unlink()
    (tmp_path / RESULTS_FILE).write_text('{"key": "cifar10", "dataset": "CIFAR-10", "metrics": {"main_metric": NaN}}\n')
    assert evaluate(tiny_folder, data_dir, *tasks) == 2


def test_a_second_model_that_starts_in_the_same_folder_fails(tiny_folder, tmp_path, monkeypatch, caplog):
    datasets.make_task(tmp_path, "cifar10", count=12)
    arguments = ("--output-dir", str(tmp_path / "out"), "--tasks", "cifar10")
    score = Classification.score

    def overtaken(task, encoder):
        monkeypatch.undo()
        assert evaluate(tiny_folder, tmp_path, *arguments, checkpoint="epoch_2.pt") == 0
        return score(task, encoder)

    monkeypatch.setattr(Classification, "score", overtaken)
    assert evaluate(tiny_folder, tmp_path, *arguments) == 2
    assert "has results with different weights" in caplog.text
    for content in (
        read_results(tmp_path / "out" / RESULTS_FILE)[0],
        json.loads((tmp_path / "out" / datacomp.SUMMARY_FILE).read_text()),
    ):
        assert Path(content["run"]["checkpoint"]).name == "epoch_2.pt"


def test_other_model_options_are_named_in_the_report(tiny_folder, tmp_path):
    """``config.json`` has the options of the run, which need no name. Other options need a folder of their own."""
    datasets.make_task(tmp_path, "cifar10", count=12)
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    shutil.copy(tiny_folder / "epoch_1.pt", tmp_path / "run" / "checkpoints")
    flags = {"model": datasets.TINY_MODEL, "image_mean": [0.4, 0.5, 0.6]}
    (tmp_path / "run" / "config.json").write_text(json.dumps({"resolved": {"flags": flags, "loss": {}}}))
    own = ("--tasks", "cifar10", "--image-mean", "0.4", "0.5", "0.6")
    assert evaluate(tmp_path / "run" / "checkpoints", tmp_path, *own, "--force-image-size", "48") == 2
    for more in ([], ["--force-image-size", "48", "--output-dir", str(tmp_path / "48")]):
        assert evaluate(tmp_path / "run" / "checkpoints", tmp_path, *own, *more) == 0
    runs = read_runs([str(tmp_path / "run"), str(tmp_path / "48")])
    protocols = [protocol for run in runs for protocol in run.final.protocols]
    assert protocols == [f"{datasets.TINY_MODEL} fp32 datacomp-4{options}" for options in ("", " force_image_size=48")]


@pytest.mark.parametrize("name", ["epoch_latest", "best"])
def test_a_checkpoint_that_training_overwrites_is_labeled_with_its_epoch(name, tiny_folder, tmp_path):
    datasets.make_task(tmp_path, "cifar10", count=12)
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    content = torch.load(tiny_folder / "epoch_1.pt", weights_only=True)
    for epoch in (1, 3):
        position = {"epoch": epoch, "step": 15 * epoch} if name == "epoch_latest" else {"epoch": epoch}
        torch.save({**content, **position}, tmp_path / "run" / "checkpoints" / f"{name}.pt")
        evaluate(tmp_path / "run" / "checkpoints", tmp_path, "--tasks", "cifar10", checkpoint=f"{name}.pt")
    (run,) = read_runs([str(tmp_path / "run")])
    assert [checkpoint.epoch for checkpoint in run.checkpoints] == [1, 3]


def test_another_number_of_classes_is_another_size(tiny_folder, tmp_path, monkeypatch):
    monkeypatch.setitem(TASKS, KITTI, replace(TASKS[KITTI], size=12))
    datasets.make_task(tmp_path, KITTI, count=12)
    evaluate(tiny_folder, tmp_path, "--output-dir", str(tmp_path / "out"), "--tasks", KITTI)
    assert json.loads((tmp_path / "out" / datacomp.SUMMARY_FILE).read_text())["other_sizes"] == [KITTI]
    (run,) = read_runs([str(tmp_path / "out")])
    assert run.final.other_sizes == {KITTI}


def test_other_data_is_evaluated_again_and_results_outlive_their_data(tiny_folder, tmp_path):
    folders = [datasets.make_task(tmp_path, key, count=12) for key in ("cifar10", "mnist")]
    arguments = ("--output-dir", str(tmp_path / "out"), "--tasks", "cifar10", "mnist")
    evaluate(tiny_folder, tmp_path, *arguments)
    first, shard = read_results(tmp_path / "out" / RESULTS_FILE), folders[0] / "test" / "0.tar"
    size = shard.stat().st_size
    datasets.write_shard(shard, [(key, {**fields, "cls": b"5"}) for key, fields in datasets.labelled_samples(12)][::2])
    assert shard.stat().st_size == size
    assert evaluate(tiny_folder, tmp_path, *arguments[:3], "mnist") == 0
    found = json.loads((tmp_path / "out" / datacomp.SUMMARY_FILE).read_text())
    assert list(found["main_metrics"]) == ["mnist"] and "have changed" in found["problems"]["cifar10"]
    shutil.rmtree(folders[1])
    assert evaluate(tiny_folder, tmp_path, *arguments) == 0
    second = {line["key"]: line["metrics"] for line in read_results(tmp_path / "out" / RESULTS_FILE)}
    assert [line["metrics"] == second[line["key"]] for line in first] == [line["key"] == "mnist" for line in first]
    (folders[0] / "test" / "1.tar").write_bytes(b"")
    assert evaluate(tiny_folder, tmp_path, *arguments) == 1
    assert set(main_metrics(tmp_path / "out")) == {"mnist"}, "a failed task must not keep its old number"


def test_a_linked_folder_and_a_broken_link_are_other_data(tiny_folder, tmp_path):
    folder = datasets.make_task(tmp_path, "cifar10", count=12)
    datasets.make_task(tmp_path, "mnist", count=12)
    store = (folder / "test").rename(tmp_path / "store")
    (folder / "test").symlink_to(store)
    output = ("--output-dir", str(tmp_path / "out"))
    assert evaluate(tiny_folder, tmp_path, *output) == 0
    before = fingerprint(folder)
    datasets.write_shard(store / "0.tar", datasets.labelled_samples(14)[::2])
    assert fingerprint(folder) != before
    (store / "0.tar").unlink()
    (store / "0.tar").symlink_to("gone.tar")
    assert evaluate(tiny_folder, tmp_path, *output) == 1
    assert set(main_metrics(tmp_path / "out")) == {"mnist"}


def test_a_failing_task_stops_no_other(tiny_folder, tmp_path, capfd):
    for key in ("cifar10", "mnist", "stl10"):
        datasets.make_task(tmp_path, key, count=12)
    shard = tmp_path / TASKS["mnist"].folder / "test" / "0.tar"
    shard.write_bytes(shard.read_bytes()[:3000])
    output = ("--output-dir", str(tmp_path / "out"))
    assert evaluate(tiny_folder, tmp_path, *output, "--tasks", "cifar10", "mnist", "stl10", "gtsrb") == 1
    shown = capfd.readouterr().out
    assert set(main_metrics(tmp_path / "out")) == {"cifar10", "stl10"}
    assert "0.tar is truncated" in shown
    assert (
        f"Not in {tmp_path} (1): GTSRB. Download with `openclip-ext download --data-dir {tmp_path} --tasks gtsrb`"
        in shown
    )
    summary = json.loads((tmp_path / "out" / datacomp.SUMMARY_FILE).read_text())
    assert set(summary["problems"]) == {"mnist"} and summary["missing"] == ["gtsrb"]
    assert evaluate(tiny_folder, tmp_path, *output, "--tasks", "cifar10", any_size=False) == 1, "wrong size is an error"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tasks", "cifar-10"], "There is no task 'cifar-10'"),
        (["--tasks", "mnist"], "has none of the 1 expected folders, such as wds_mnist_test. Found: wds_cifar10_test"),
        (["--data-dir", "/nowhere"], "--data-dir /nowhere has none of the 40 expected folders, such as "),
        (["--device", "cpu", "--precision", "amp"], "--precision amp needs CUDA"),
    ],
)
def test_what_cannot_be_evaluated_is_one_sentence(arguments, message, tiny_folder, tmp_path, caplog):
    datasets.make_task(tmp_path, "cifar10", count=12)
    assert evaluate(tiny_folder, tmp_path, *arguments) == 2
    assert message in caplog.text
    assert "Traceback" not in caplog.text
    assert not list(tmp_path.rglob(RESULTS_FILE))


def test_tasks_are_shared_evenly():
    shares = datacomp.share_tasks(TASKS, 8)
    assert sorted(key for share in shares for key in share) == sorted(TASKS)
    loads = [sum(TASKS[key].size for key in share) for share in shares]
    assert max(loads) <= max(TASKS["sun397"].size, 1.1 * sum(loads) / 8)


@pytest.mark.parametrize(("cores", "processes", "workers"), [(16, 1, 16), (96, 8, 12), (96, 1, 16), (2, 8, 1)])
def test_workers_are_the_cores_that_are_there(cores, processes, workers, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(cores)), raising=False)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(processes))
    args = datacomp.parse_args(["--model", "m", "--data-dir", "d"])
    assert args.workers == workers


def _evaluate(argv: list[str]) -> tuple[int, str]:
    with redirect_stdout(io.StringIO()) as shown:
        return datacomp.main(argv), shown.getvalue()


def test_two_processes_share_the_tasks(tiny_folder, data_dir, all_tasks, tmp_path, model_arguments):
    """Two processes with data workers evaluate every task once, print one summary, and get the same numbers as one process."""
    tasks = ["cifar10", "mnist", "wilds/fmow", "retrieval", "fairness/utkface"]
    argv = [
        *model_arguments,
        "--model-config",
        str(tiny_folder / f"{datasets.TINY_MODEL}.json"),
        "--data-dir",
        str(data_dir),
    ]
    argv += ["--output-dir", str(tmp_path), "--workers", "1", "--allow-size-mismatch", "--tasks", *tasks]
    (first, shown), (second, nothing) = two_ranks().run(_evaluate, argv, group=False)
    assert (first, second, nothing) == (0, 0, "")
    assert shown.count("DataComp average (38): partial, 6/38") == 1
    found = {line["key"]: line["metrics"] for line in read_results(tmp_path / RESULTS_FILE)}
    assert found.keys() == {task.key for task in select_tasks(tasks)}
    for line in read_results(all_tasks[0] / RESULTS_FILE):
        if line["key"] in found:
            assert found[line["key"]] == pytest.approx(line["metrics"], abs=1e-6), line["key"]


@pytest.mark.parametrize(
    "name",
    ["beyond", "datacomp", "download", "report", "shapes", "cliplite.editing", "cliplite.grounding", "cliplite.probes"],
)
def test_a_command_of_a_clone_starts(name, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["", *(["eval"] if name == "beyond" else []), "--help"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module(f"eval.{name}", run_name="__main__")
    assert not ended.value.code and "usage:" in capsys.readouterr().out


def test_results_are_stored_in_the_run_also_from_within_its_folder_of_checkpoints(tmp_path, monkeypatch):
    checkpoint = tmp_path / "run" / "checkpoints" / "epoch_1.pt"
    checkpoint.parent.mkdir(parents=True)
    checkpoint.touch()
    monkeypatch.chdir(checkpoint.parent)
    for path in (checkpoint, Path("epoch_1.pt")):
        loaded: Any = SimpleNamespace(name="ViT-B-32", checkpoint=str(path))
        assert datacomp.default_output_dir(loaded) == tmp_path / "run" / "datacomp" / "epoch_1"
