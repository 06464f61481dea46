"""A user's own data are tasks: class folders, tables of labels or pairs, shards, and folders in DataComp's layout."""

import json
import math
import shutil
from pathlib import Path

import pytest
import torch
from PIL import Image

from openclip_ext.evaluation import datacomp
from openclip_ext.evaluation.report.__main__ import main as run_report
from openclip_ext.evaluation.results import LOG_FILE, read_log
from tests.data.shards import write_csv, write_shards
from tests.evaluation import datasets

COUNT = 40
NAMES = datasets.DIGIT_NAMES


@pytest.fixture
def evaluate(model_arguments, tmp_path):
    """Return a function that runs the command, and returns the exit status and the lines of the results by key."""

    def run(*arguments: object) -> tuple[int, dict[str, dict]]:
        status = datacomp.main([*model_arguments, "--output-dir", str(tmp_path / "out"), *map(str, arguments)])
        return status, {line["key"]: line for line in read_log(tmp_path / "out") if line["state"] == "done"}

    return run


@pytest.fixture
def photos(tmp_path) -> Path:
    """Return class folders of digits."""
    datasets.write_class_folders(tmp_path / "photos", COUNT, lambda label: NAMES[label])
    (tmp_path / "photos" / ".cache").mkdir()
    return tmp_path / "photos"


def accuracy(tiny, photos: Path, template: str) -> float:
    """Return the zero-shot accuracy by the model alone."""
    classes = sorted(path.name for path in photos.iterdir() if path.is_dir() and not path.name.startswith("."))
    files = [(path, label) for label, name in enumerate(classes) for path in sorted((photos / name).iterdir())]
    with torch.no_grad():
        texts = tiny.model.encode_text(
            tiny.tokenizer([template.format(name.replace("_", " ")) for name in classes]), normalize=True
        )
        images = torch.stack([tiny.transform(Image.open(path)) for path, _ in files])
        found = (tiny.model.encode_image(images, normalize=True) @ texts.T).argmax(dim=1)
    return (found == torch.tensor([label for _, label in files])).double().mean().item()


def test_class_folders_are_a_task_without_any_data_of_datacomp(evaluate, photos, tiny, capsys):
    (photos / NAMES[0]).rename(photos / f"{NAMES[0]}_digit")
    status, found = evaluate("--tasks", photos)
    assert status == 0 and found.keys() == {"photos"}
    value = found["photos"]["metrics"]["acc1"]
    assert value == accuracy(tiny, photos, "a photo of a {}")
    # The interval is Student's t of the hits.
    expected = 2.022691 * math.sqrt(value * (1 - value) / (COUNT - 1))
    assert found["photos"]["half_widths"]["acc1"] == pytest.approx(expected, rel=1e-5)
    shown = capsys.readouterr().out
    assert f"{value:.4f} ± {expected:.4f}" in shown and "DataComp average" not in shown
    # DataComp's file has only DataComp's tasks, because its script averages all lines.
    assert (photos.parent / "out" / "eval_results.jsonl").read_text() == ""
    (photos / "zeroshot_classification_templates.txt").write_text("{c}\n")
    _, found = evaluate("--tasks", photos)
    assert found["photos"]["metrics"]["acc1"] == accuracy(tiny, photos, "{}"), "the data have changed"
    _, found = evaluate("--tasks", photos, "--template", "digit {}")
    assert found["photos"]["metrics"]["acc1"] == accuracy(tiny, photos, "digit {}"), "the prompt has changed"


def test_a_run_folder_or_its_checkpoint_is_the_model(photos, tiny_folder, tmp_path):
    checkpoint = tmp_path / "run" / "checkpoints" / "epoch_1.pt"
    checkpoint.parent.mkdir(parents=True)
    shutil.copy(tiny_folder / "epoch_1.pt", checkpoint)
    table = write_csv(tmp_path, rows=6, columns=("place", "words"))
    flags = {"model": datasets.TINY_MODEL, "csv_img_key": "place", "csv_caption_key": "words"}
    flags["caption_template"] = "the digit {}"
    (tmp_path / "run" / "config.json").write_text(json.dumps({"resolved": {"flags": flags, "loss": {}}}))
    for model, more in (("run", []), ("run/checkpoints/epoch_1.pt", ["--overwrite"])):
        arguments = [str(tmp_path / model), "--tasks", str(photos), "--val-data", str(table), "--device", "cpu", *more]
        assert datacomp.main([*arguments, "--workers", "0"]) == 0
        lines = read_log(tmp_path / "run" / "datacomp" / "epoch_1")
        assert [line["key"] for line in lines if line["state"] == "done"] == ["photos", "val-data"]
    assert lines[0]["data"].endswith(flags["caption_template"]), "the prompt is the run's"
    run_report([str(tmp_path / "run"), "--output", str(tmp_path / "report")])
    page = (tmp_path / "report" / "report.md").read_text()
    assert f"| photos | acc1 | {100 * lines[0]['metrics']['acc1']:.2f} |" in page and "| val-data | mean_R@1 |" in page
    assert "DataComp average" not in page


@pytest.mark.parametrize("folders", ["names", "numbers", "order"])
def test_classnames_name_the_folders(folders, evaluate, photos, tiny):
    expected = accuracy(tiny, photos, "a photo of a {}")
    lines = sorted(NAMES)
    if folders != "names":
        for number, name in enumerate(lines):
            (photos / name).rename(photos / (f"{number}" if folders == "numbers" else f"class {number}"))
    (photos / "classnames.txt").write_text("".join(f"{name}\n" for name in lines))
    status, found = evaluate("--tasks", photos)
    assert status == 0 and found["photos"]["metrics"]["acc1"] == expected


@pytest.mark.parametrize("kind", ["csv", "tsv", "jsonl", "parquet", "numbers"])
def test_a_table_of_labels_is_a_task(kind, evaluate, photos, tiny):
    rows = [{"image": str(path), "label": path.parent.name} for path in sorted(photos.rglob("*.png"))]
    path = photos.parent / f"table.{kind}"
    if kind in ("csv", "tsv"):
        separator = "," if kind == "csv" else "\t"
        header = ["image", "label"] if kind == "csv" else ["Image", "Label"]
        path.write_text("\n".join(separator.join(row) for row in [header, *(row.values() for row in rows)]))
    elif kind == "jsonl":
        pytest.importorskip("datasets")
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        data = pytest.importorskip("datasets").Dataset.from_list(rows)
        data = data.map(lambda row: {"image": {"bytes": Path(row["image"]).read_bytes(), "path": None}})
        if kind == "numbers":  # as Hugging Face stores classes
            path = photos.parent / "table.parquet"
            data = data.class_encode_column("label")
        data.to_parquet(str(path))
    status, found = evaluate("--tasks", path)
    assert status == 0 and found["table"]["metrics"]["acc1"] == accuracy(tiny, photos, "a photo of a {}")


def test_pairs_are_a_task_in_every_format_and_knows_equal_captions(evaluate, tmp_path):
    write_shards(tmp_path / "shards", [7, 5])
    table = write_csv(tmp_path, rows=12)
    status, found = evaluate("--tasks", table, f"{tmp_path}/shards/*.tar", "--val-data", table)
    assert status == 0 and found["val-data"]["metrics"] == found[table.stem]["metrics"]
    for line in found.values():
        recalls = [line["metrics"][f"{direction}_R@1"] for direction in ("image_to_text", "text_to_image")]
        assert line["metrics"]["main_metric"] == pytest.approx(sum(recalls) / 2) and line["samples"] == 12
    # Each of two images occurs with each of two captions, so no answer is wrong.
    images = [str(tmp_path / f"{number}.jpg") for number in (0, 0, 1, 1)]
    lines = [f"{image},{caption}" for image, caption in zip(images, ("a cat", "a dog") * 2, strict=True)]
    (tmp_path / "equal.csv").write_text("\n".join(["image,caption", *lines]))
    _, found = evaluate("--tasks", tmp_path / "equal.csv")
    assert found["equal"]["metrics"]["main_metric"] == 1


@pytest.mark.parametrize("key", ["mnist", "retrieval/flickr_1k_test_image_text_retrieval", "misc/winogavil"])
def test_a_folder_in_datacomps_layout_is_a_task_of_any_size(key, evaluate, tmp_path):
    folder = datasets.make_task(tmp_path / "data", key, count=12)
    status, by_key = evaluate("--data-dir", tmp_path / "data", "--tasks", key, "--allow-size-mismatch")
    assert status == 0
    own = shutil.copytree(folder, tmp_path / "mine")
    status, found = evaluate("--tasks", own)
    assert status == 0
    values = {name: value for name, value in found["mine"]["metrics"].items() if name != "main_metric"}
    assert values == {name: by_key[key]["metrics"][name] for name in values}


def test_own_tasks_and_datacomps_share_a_folder_and_a_run(evaluate, photos, tmp_path):
    datasets.make_task(tmp_path / "data", "mnist", count=12)
    arguments = ("--tasks", photos, "mnist", "--data-dir", tmp_path / "data", "--allow-size-mismatch")
    status, found = evaluate(*arguments)
    assert status == 0 and found.keys() == {"photos", "mnist"}
    log = (tmp_path / "out" / LOG_FILE).read_text()
    assert evaluate(*arguments) == (0, found) and (tmp_path / "out" / LOG_FILE).read_text() == log


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["--tasks", "./missing"], "not found"),
        (["--tasks", "photoz"], "path of your own data"),
        (["--tasks", "mnist"], "--data-dir"),
        ([], "--tasks PATH|own data in --tasks"),
        (["--tasks", "{photos}", "--template", "a photo"], "--template"),
        (["--tasks", "{photos}/zero"], "no folder"),
    ],
)
def test_what_is_no_task_is_one_sentence(arguments, word, evaluate, photos, caplog):
    status, found = evaluate(*(text.format(photos=photos) if "{photos" in text else text for text in arguments))
    assert status in (1, 2) and found == {}
    assert any(one in caplog.text for one in word.split("|")) and "Traceback" not in caplog.text


def test_a_label_that_is_missing_is_named(evaluate, photos, caplog):
    path = photos.parent / "table.csv"
    rows = [f"{image},{'' if number == 2 else 'zero'}" for number, image in enumerate(sorted(photos.rglob("*.png")))]
    path.write_text("\n".join(["image,label", *rows]))
    assert evaluate("--tasks", path)[0] == 1
    assert "row 2 has no label" in caplog.text
