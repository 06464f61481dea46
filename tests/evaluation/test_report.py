"""The report command: its numbers are correct, and its pages need no external resources."""

import csv
import html
import json
import math
import re
import statistics
from collections.abc import Iterable, Mapping
from pathlib import Path
from xml.etree import ElementTree

import pytest

from openclip_ext.evaluation.report.__main__ import main
from openclip_ext.evaluation.report.runs import Value, read_runs
from openclip_ext.evaluation.tasks import AVERAGED, FLICKR, GROUPS, MSCOCO, TASKS

AVERAGE, RETRIEVAL = "DataComp average (38)", "Retrieval, NeuCLIP and AmorLIP (Flickr, MSCOCO)"
# The first line of docs/openclip_results.csv in OpenCLIP's repository.
OPENCLIP_HEADER = (
    "name,pretrained,Average perf. on 38 datasets,ImageNet 1k,Caltech-101,CIFAR-10,CIFAR-100,CLEVR Counts,"
    "CLEVR Distance,Country211,Describable Textures,EuroSAT,FGVC Aircraft,Food-101,GTSRB,ImageNet Sketch,ImageNet v2,"
    "ImageNet-A,ImageNet-O,ImageNet-R,KITTI Vehicle Distance,MNIST,ObjectNet,Oxford Flowers-102,Oxford-IIIT Pet,"
    "Pascal VOC 2007,PatchCamelyon,Rendered SST2,RESISC45,Stanford Cars,STL-10,SUN397,SVHN,Flickr,MSCOCO,WinoGAViL,"
    "iWildCam,Camelyon17,FMoW,Dollar Street,GeoDE"
)
RUN = {"model": "ViT-B-32", "weights": "w", "config": "c", "precision": "datacomp", "protocol": "datacomp-1"}


def write_results(folder: Path, scores: Mapping[str, float | None], **extra: object) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "eval_results.jsonl", "w", encoding="utf-8") as stream:
        for key, score in scores.items():
            line = {"key": key, "dataset": TASKS[key].name, "metrics": {"acc1": 0.5, "main_metric": score}}
            stream.write(json.dumps({**line, "run": RUN, "found": TASKS[key].size, **extra}) + "\n")
    return folder / "eval_results.jsonl"


def all_scores(offset: float, keys: Iterable[str] = AVERAGED) -> dict[str, float]:
    return {key: offset + 0.01 * number for number, key in enumerate(keys)}


def write_training(folder: Path, epochs: int, evaluations: Mapping[int, Mapping[str, float]] | None = None) -> None:
    """Write ``metrics.jsonl`` as the trainer would: epochs have ten steps of 64 samples; steps 0, 5 and 9 are logged."""
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "metrics.jsonl", "w", encoding="utf-8") as stream:
        for step in range(10 * epochs):
            if step % 10 in (0, 5, 9):
                record = {"step": step, "epoch": step // 10, "samples": 64 * (step + 1), "global_batch": 64}
                record |= {"loss": 4.0 - step / 10, "infonce": 3.0 - step / 20, "temperature": None}
                record |= {
                    "samples_per_second": 1.0 if step < 5 else 8.0,
                    "skipped_steps": step,
                    "bad_samples": 2 * step,
                }
                stream.write(json.dumps(record) + "\n")
            completed = (step + 1) // 10
            if step % 10 == 9:  # one more bad sample was found after the last batch
                end = {"step": step, "epoch": step // 10, "samples": 64 * (step + 1), "bad_samples": 2 * step + 1}
                stream.write(json.dumps(end) + "\n")
            if step % 10 == 9 and evaluations and completed in evaluations:
                evaluation = {"step": step + 1, "epoch": completed, "evaluation": evaluations[completed]}
                stream.write(json.dumps(evaluation) + "\n")
        stream.write('{"step": 99, "epo')  # the run was killed during this write


def tables_of(text: str) -> list[list[list[str]]]:
    """Return all tables of a page; each table is a list of rows, and each row a list of cell texts."""

    def parts(tags: str, inside: str) -> list[str]:
        return re.findall(rf"<(?:{tags})\b[^>]*>(.*?)</(?:{tags})>", inside, re.DOTALL)

    tables = parts("table", text)
    return [[[html.unescape(cell) for cell in parts("td|th", row)] for row in parts("tr", table)] for table in tables]


def charts_of(text: str) -> dict[str, ElementTree.Element]:
    found = [ElementTree.fromstring(svg) for svg in re.findall(r"<svg.*?</svg>", text, re.DOTALL)]
    return {chart.attrib["aria-label"]: chart for chart in found}


def hints_of(chart: ElementTree.Element) -> list[str]:
    """Return the tooltips of a chart in drawing order."""
    return [title.text or "" for title in chart.iter("{http://www.w3.org/2000/svg}title")]


def csv_rows(tmp_path: Path) -> list[dict[str, str]]:
    with open(tmp_path / "report" / "report.csv", newline="", encoding="utf-8") as stream:
        return list(csv.DictReader(stream))


def report(tmp_path: Path, *arguments: str) -> tuple[list[list[list[str]]], str]:
    """Write a report; return the tables and the text of its page. Assert that the page links to no external resource."""
    main([*arguments, "--output", str(tmp_path / "report")])
    text = (tmp_path / "report" / "report.html").read_text(encoding="utf-8")
    assert "@import" not in text and " src=" not in text
    assert {reference[0] for reference in re.findall(r"(?:url\(|href=.)([^)\"]+)", text)} <= {"#"}
    return tables_of(text), text


def test_two_runs_in_all_three_forms(tmp_path: Path) -> None:
    first, second = all_scores(0.1), all_scores(0.15)
    second["cifar10"] = 0.06  # only this task gets worse
    # DataComp's harness writes NaN, and no number of samples.
    write_results(tmp_path / "first", {**first, "fairness/fairface": float("nan")}, found=None)
    write_results(tmp_path / "second", {**second, "fairness/fairface": None}, samples=100)  # others do not decode
    with open(tmp_path / "second" / "eval_results.jsonl", "a", encoding="utf-8") as stream:
        stream.write('{"key": "own", "metrics": {"main_metric": 0.25}}\n')
    tables, text = report(tmp_path, f"A={tmp_path / 'first'}", f"B={tmp_path / 'second'}")

    averages, tasks = ({row[0]: row[1:] for row in table} for table in tables)
    mean = [100 * statistics.fmean(scores.values()) for scores in (first, second)]
    assert averages[AVERAGE] == [f"{mean[0]:.2f}", f"{mean[1]:.2f}", f"+{mean[1] - mean[0]:.2f}"]
    assert len(averages) == 1 + len(GROUPS)
    assert tasks["CIFAR-10"] == ["acc1", "11.00", "6.00", "−5.00"]
    assert tasks["Flickr"][0] == "mean_recall@1" and len(tasks) == 1 + 38 + 1 and "FairFace" not in tasks
    assert tables[0][0] == ["group", "A", "B", "B − A"] and tasks["own"] == ["main metric", "-", "25.00", "-"]
    for cells in (
        'best">11.00</td><td class="">6.00</td><td class="down">−5.00<',
        'best">33.24</td><td class="up">+4.74<',
    ):
        assert cells in text

    # The CSV file has one row per model. Its first columns are those of OpenCLIP's published results.
    a, b = csv_rows(tmp_path)
    assert ",".join(list(a)[:41]) == OPENCLIP_HEADER
    assert (a["name"], a["pretrained"], b["name"]) == ("A", "first", "B")
    assert float(a["Average perf. on 38 datasets"]) == pytest.approx(statistics.fmean(first.values()), abs=1e-15)
    assert float(a["ImageNet 1k"]) == first["imagenet1k"] and float(b["CIFAR-10"]) == 0.06
    assert float(b["VTAB (13)"]) == pytest.approx(statistics.fmean(second[key] for key in GROUPS["VTAB (13)"]))
    lines = (tmp_path / "report" / "report.md").read_text(encoding="utf-8").splitlines()
    assert (
        "| CIFAR-10 | acc1 | 11.00 | 6.00 | −5.00 |" in lines and "- A: first (ViT-B-32 datacomp datacomp-1)" in lines
    )

    averages, chart = (charts_of(text)[f"B − A, percentage points: {count} bars"] for count in (len(GROUPS), 38))
    assert hints_of(averages)[1] == "ImageNet 1k (average): 21.00 → 26.00"
    assert len(hints_of(chart)) == 38 and hints_of(chart)[-1] == "CIFAR-10 (acc1): 11.00 → 6.00, standard error 2.40"
    errors = {
        key: [
            math.sqrt(first[key] * (1 - first[key]) / TASKS[key].size),
            math.sqrt(second[key] * (1 - second[key]) / 100),
        ]
        for key in first
    }
    better = sum(second[key] - first[key] > 2 * math.hypot(*both) for key, both in errors.items())
    assert f"B is better on {better} of 38 tasks and worse on 1 by more than two standard errors" in text


def write_run(folder: Path, loss: str, seed: int, recall: float, epochs: int = 2) -> str:
    """Write the run folder of a training run with a validation after each epoch; return its path."""
    evaluations = {1: {"image_to_text_R@1": recall / 2, "top1": recall}, 2: {"image_to_text_R@1": recall}}
    write_training(folder, epochs, evaluations)
    flags = {"lr": 1e-3, "eps": 1e-8, "seed": seed, "name": folder.name, "batch_size": 64}
    config = {
        "flags": flags,
        "loss": {"name": loss, "options": {"eps": 0.0, "rho": 4.0} if loss == "queueclip" else {}},
    }
    (folder / "config.json").write_text(json.dumps({"resolved": config}))
    return str(folder)


def test_two_ordinary_runs_are_shown_side_by_side(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """If runs have no DataComp results, the report compares their settings, training curves and validation metrics."""
    first, second = (
        write_run(tmp_path / loss, loss, 0, 0.3 + 0.1 * place) for place, loss in enumerate(("openclip", "queueclip"))
    )
    tables, text = report(tmp_path, first, second)
    settings, course, validation = tables
    assert settings == [["settings that differ", "openclip", "queueclip"], ["loss", "openclip", "queueclip"]]
    # The first step took 64 s, and the other 19 steps 8 s each.
    assert [row[1] for row in course[1:]] == ["1.28k", "3.6", "5.926", "2.050", "-", "19", "39"]
    assert validation[1:] == [["image_to_text_R@1, %", "30", "40, +10"], ["top1, %", "30", "40, +10"]]
    assert {"InfoNCE of the batch over samples seen", "image_to_text_R@1 over samples seen"} <= charts_of(text).keys()
    assert "| image_to_text_R@1, % | 30 | 40, +10 |" in capsys.readouterr().out
    assert not (tmp_path / "report" / "report.csv").exists()

    # The second run has a score before training, and what it keeps is a share of an own task.
    before = {"step": 0, "epoch": 0, "evaluation": {"image_to_text_R@1": 0.25, "kept_photos": 0.5}}
    log = Path(second, "metrics.jsonl")
    log.write_text(f"{json.dumps(before)}\n{log.read_text()}")
    tables, _ = report(tmp_path, first, second)
    start = ["image_to_text_R@1, %", "-", "25"], ["kept_photos, %", "-", "50"]
    assert tables[2] == [["before training", "openclip", "queueclip"], *start]
    assert tables[3][1] == ["image_to_text_R@1, %", "30", "40, +10"]


def test_the_mixes_that_fine_tunings_chose_are_compared(tmp_path: Path) -> None:
    """The scores of the chosen mix, not those of the trained weights, are the result of a fine-tuning."""
    arguments = []
    for name, seed, alpha, own in (("A", 0, 0.5, 0.30), ("A", 1, 0.7, 0.31), ("B", 0, 1.0, 0.35), ("B", 1, 0.8, 0.38)):
        folder = Path(write_run(tmp_path / f"{name}{seed}", "openclip", seed, 0.9))
        scores = {"validation": {"0": {"value": 0.1}, f"{alpha:g}": {"value": own, "half": 0.02, "samples": 200}}}
        (folder / "interpolation.json").write_text(json.dumps({"chosen": alpha, "scores": scores}))
        arguments.append(f"{name}={folder}")
    tables, _ = report(tmp_path, *arguments)
    # The paired differences are 5 and 7 points. The interval is 6 ± 12.706 * sqrt(2) / sqrt(2).
    assert tables[-1] == [
        ["chosen mix", "A", "B"],
        ["α", "0.6 ± 0.14", "0.9 ± 0.14, +0.3 (−2.24 to 2.84)"],
        ["validation, %", "30.5 ± 0.71", "36.5 ± 2.1, +6 (−6.71 to 18.7)"],
    ]
    (tmp_path / "B1" / "interpolation.json").unlink()
    assert report(tmp_path, *arguments)[0][-1][2] == ["validation, %", "30.5 ± 0.71", "-"]
    (tmp_path / "B0" / "interpolation.json").write_text('{"chosen": 0.3, "scores": {"validation": {}}}')
    with pytest.raises(ValueError, match=r"interpolation\.json has no scores of mixes: KeyError"):
        report(tmp_path, *arguments)


def test_an_unfinished_run_is_marked(tmp_path: Path) -> None:
    for name, epochs in (("whole", 3), ("shortened", 3), ("interrupted", 1)):
        folder = Path(write_run(tmp_path / name, "openclip", 0, -0.3, epochs))
        config = json.loads((folder / "config.json").read_text())
        config["resolved"]["flags"]["epochs"] = 3
        # Bad samples have shortened the second run.
        config["resolved"]["steps"] = 31 if name == "shortened" else 30
        (folder / "config.json").write_text(json.dumps(config))
    tables, _ = report(tmp_path, *(str(tmp_path / name) for name in ("whole", "shortened", "interrupted")))
    assert tables[0][1] == ["logged steps", "all", "all", "10 of 30"]
    assert {cell[0] for cell in tables[-1][1][1:]} == {"−"}, "a column has one kind of minus signs"


def test_repeats_of_trainings_have_intervals(tmp_path: Path) -> None:
    names = {"A": (0.30, 0.31, 0.35), "B": (0.35, 0.37, 0.42)}
    arguments = [
        f"{name}={write_run(tmp_path / f'{name}{seed}', 'openclip', seed, value)}"
        for name, values in names.items()
        for seed, value in enumerate(values)
    ]
    tables, _ = report(tmp_path, *arguments)
    # The paired differences are 5, 6 and 7 points: mean 6, standard deviation 1. The interval is 6 ± 4.303 * 1 / sqrt(3).
    assert tables[-1][1] == ["image_to_text_R@1, %", "32 ± 2.6", "38 ± 3.6, +6 (3.52 to 8.48)"]

    # If a repeat of B stopped earlier, B's values are those of the last epoch that all its repeats have.
    first, second = "32 ± 2.6", "19 ± 1.8, −13 (−15.2 to −10.8)"
    for epochs, expected in ((1, [f"{first}, epoch 2", f"{second}, epoch 1"]), (0, [first, "-"])):
        write_run(tmp_path / "B2", "openclip", 2, 0.42, epochs)
        if not epochs:
            write_training(tmp_path / "B2", 1)
        tables, _ = report(tmp_path, *arguments)
        assert tables[-1][1] == ["image_to_text_R@1, %", *expected]
        assert tables[-2][1] == ["samples seen", "1.28k", "1.067k"]
    tables, _ = report(tmp_path, *reversed(arguments))
    assert tables[-1][1] == ["image_to_text_R@1, %", "-", first]

    # Without settings, the seeds are unknown.
    for name, values in names.items():
        for seed, value in enumerate(values):
            write_run(tmp_path / f"{name}{seed}", "openclip", seed, value)
            (tmp_path / f"{name}{seed}" / "config.json").unlink()
    tables, _ = report(tmp_path, *arguments)
    assert tables[-1][1] == ["image_to_text_R@1, %", "32 ± 2.6", "38 ± 3.6, +6"]


def test_averages_only_over_complete_sets(tmp_path: Path) -> None:
    scores = all_scores(0.1)
    del scores[MSCOCO], scores["mnist"]
    write_results(tmp_path / "partial", scores)
    write_results(tmp_path / "few", {"mnist": 0.5})
    tables, text = report(tmp_path, str(tmp_path / "partial"), f"<script>|&={tmp_path / 'few'}")
    assert text.count("<script>") == 1 and tables[0][0][2] == "<script>|&" and " against " not in text
    averages = {row[0]: row[1:] for row in tables[0]}
    assert averages[AVERAGE] == ["partial 36/38", "partial 1/38", "-"]
    assert averages[RETRIEVAL] == ["partial 1/2", "-", "-"]
    assert re.fullmatch(r"\d\d\.\d\d", averages["ImageNet & variants (7)"][0])
    partial, few = csv_rows(tmp_path)
    assert partial["Average perf. on 38 datasets"] == few["Caltech-101"] == "" and float(few["MNIST"]) == 0.5


def test_repeats_of_one_name_are_averaged(tmp_path: Path) -> None:
    offsets = (0.10, 0.12, 0.17)
    for number, offset in enumerate(offsets):
        write_results(tmp_path / f"seed{number}", all_scores(offset))
    write_results(tmp_path / "base", all_scores(0.1))
    tables, text = report(tmp_path, f"base={tmp_path / 'base'}", *(f"ours={tmp_path / f'seed{n}'}" for n in range(3)))
    mean, deviation = statistics.fmean(offsets), statistics.stdev(offsets)
    averages = {row[0]: row[1:] for row in tables[0]}
    base = 100 * (0.1 + 0.01 * 37 / 2)
    expected = f"{base + 100 * (mean - 0.1):.2f} ± {100 * deviation:.2f}"
    assert averages[AVERAGE] == [f"{base:.2f}", expected, f"+{100 * (mean - 0.1):.2f}"]
    assert "mean ± standard deviation of 3 repeats" in text
    _, row = csv_rows(tmp_path)
    assert float(row["Average perf. on 38 datasets sd"]) == pytest.approx(deviation) and row["repeats"] == "3"

    # Of several checkpoints, those are averaged that all repeats have.
    for number, epochs in enumerate(((1, 2), (2, 3))):
        for epoch in epochs:
            write_results(
                tmp_path / f"run{number}" / "datacomp" / f"epoch_{epoch}", all_scores(0.1 * number + 0.01 * epoch)
            )
    (run,) = read_runs([f"ours={tmp_path / 'run0'}", f"ours={tmp_path / 'run1'}"])
    assert [one.label for one in run.checkpoints] == ["epoch_2"]
    assert run.final.score("imagenet1k").mean == pytest.approx(all_scores(0.07)["imagenet1k"])

    # Checkpoints of different epochs are averaged if they are the repeats' only ones.
    for epoch in (1, 4):
        write_training(tmp_path / f"only{epoch}", epoch)
        write_results(tmp_path / f"only{epoch}" / "datacomp" / f"epoch_{epoch}", all_scores(0.1))
    (run,) = read_runs([f"ours={tmp_path / 'only1'}", f"ours={tmp_path / 'only4'}"])
    assert (run.final.label, run.final.samples) == ("epoch_1, epoch_4", (640 + 4 * 640) / 2)

    # If one repeat has no result for a task, the task gets no number. The mean of the other repeats would be misleading.
    write_results(tmp_path / "seed1", {key: 0.5 for key in AVERAGED if key != "mnist"})
    (run,) = read_runs([f"ours={tmp_path / 'seed0'}", f"ours={tmp_path / 'seed1'}"])
    assert run.final.score("mnist") is None and run.final.score(AVERAGE) is None


def test_run_folder_becomes_learning_curves(tmp_path: Path) -> None:
    run = tmp_path / "logs" / "neuclip"
    for epoch in (2, 10):
        write_results(run / "datacomp" / f"epoch_{epoch}", all_scores(0.01 * epoch))
    write_results(run / "datacomp" / "epoch_10_step_105", all_scores(0.2))
    suite = {f"datacomp/{key}": 0.3 for key in (FLICKR, MSCOCO)}
    during = {**suite, f"datacomp/average/{RETRIEVAL}": 0.3, "clip_val_loss": 1.5}
    write_training(run, epochs=11, evaluations={2: {**during, "datacomp/mnist": 0.9}, 4: during})
    (found,) = read_runs([str(run)])
    assert found.name == "neuclip"
    assert [(entry.label, entry.epoch, entry.samples) for entry in found.checkpoints] == [
        ("epoch_2", 2, 1280),
        ("epoch_4", 4, 2560),
        ("epoch_10", 10, 6400),
        ("epoch_10_step_105", 10, 6720),
    ]
    # Epoch 2 has a full evaluation, which replaces results from training. Epoch 4 only has results from training.
    assert found.checkpoints[0].score("mnist").mean == pytest.approx(all_scores(0.02)["mnist"])
    assert found.checkpoints[1].score(RETRIEVAL) == Value(0.3)
    assert found.checkpoints[1].score(AVERAGE) is None
    assert found.final.label == "epoch_10_step_105"
    # A result file replaces results from training unless it has fewer tasks.
    for scores, expected in (({FLICKR: 0.5}, 0.3), ({FLICKR: 0.5, MSCOCO: 0.7}, 0.6)):
        write_results(run / "datacomp" / "epoch_4", scores)
        assert read_runs([str(run)])[0].checkpoints[1].score(RETRIEVAL).mean == pytest.approx(expected)
    charts = charts_of(report(tmp_path, str(run))[1])
    scores = {"1.28k": 0.02, "6.4k": 0.1, "6.72k": 0.2}
    assert hints_of(charts[f"{AVERAGE} over samples seen"]) == [
        f"neuclip: {100 * (score + 0.185):.4g} at {samples} samples seen" for samples, score in scores.items()
    ]
    assert len(hints_of(charts[f"{RETRIEVAL} over samples seen"])) == 4


def test_checkpoints_are_ordered_without_a_training_log(tmp_path: Path) -> None:
    labels = ["epoch_latest", "other", "epoch_1", "epoch_2", "epoch_2_step_9", "epoch_2_step_10"]
    for label in labels:
        write_results(tmp_path / "datacomp" / label, all_scores(0.1))
    (run,) = read_runs([str(tmp_path)])
    assert [checkpoint.label for checkpoint in run.checkpoints] == labels
    assert run.final.label == "epoch_2_step_10"


def test_what_makes_numbers_incomparable_is_said(tmp_path: Path) -> None:
    write_results(tmp_path / "one", all_scores(0.1))
    write_results(tmp_path / "two", all_scores(0.1), run={**RUN, "model": "RN50"})
    _, text = report(tmp_path, str(tmp_path / "one"), str(tmp_path / "two"))
    assert "not evaluated in the same way" not in text and "†" not in text
    write_results(tmp_path / "two", all_scores(0.1), run={**RUN, "precision": "fp32"}, found=24)
    _, text = report(tmp_path, str(tmp_path / "one"), str(tmp_path / "two"))
    assert "not evaluated in the same way" in text and "ViT-B-32 fp32 datacomp-1" in text
    assert [row["other_sizes"] for row in csv_rows(tmp_path)] == ["", " ".join(sorted(AVERAGED))]
    assert "not comparable with DataComp's numbers" in (tmp_path / "report" / "report.md").read_text(encoding="utf-8")


def test_one_run_is_no_repeat_and_another_run_needs_a_name(tmp_path: Path) -> None:
    first, second = (write_results(tmp_path / name, all_scores(0.1)) for name in "ab")
    with pytest.raises(ValueError, match="is given twice"):
        read_runs([f"ours={first}", f"ours={first}"])
    assert read_runs([f"{'a' * 300}={first}"])[0].name == "a" * 300  # longer than a file name
    (run,) = read_runs([str(first)])
    for both in ([str(first), f"{run.name}={second}"], [f"{run.name}={second}", str(first)]):
        with pytest.raises(ValueError, match="has the name of another run"):
            read_runs(both)


def test_wrong_input(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "notes.txt").touch()
    (tmp_path / "broken.jsonl").write_text('not json\n{"key": "mnist", "metrics": null}\n')
    for path, expected in (("none", "none not found"), ("empty", "notes.txt"), ("broken.jsonl", "has no results")):
        with pytest.raises(ValueError, match=expected):
            main([str(tmp_path / path), "--output", str(tmp_path / "report")])
    assert not (tmp_path / "report").exists()


def test_a_folder_with_evaluations_only_is_a_run(tmp_path: Path) -> None:
    (tmp_path / "before").mkdir()
    line = {"step": 0, "epoch": 0, "evaluation": {"image_to_text_R@1": 0.25}}
    (tmp_path / "before" / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    (tmp_path / "after").mkdir()
    write_training(tmp_path / "after", 2, {2: {"image_to_text_R@1": 0.5}})
    for runs in (["before"], ["before", "after"]):
        tables, _ = report(tmp_path, *(str(tmp_path / run) for run in runs))
        assert tables[-1][1][:2] == ["image_to_text_R@1, %", "25, epoch 0" if runs[1:] else "25"]
