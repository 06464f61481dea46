"""A user's own data are tasks: class folders, tables of labels or pairs, shards, and folders in DataComp's layout."""

import json
import math
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from openclip_ext.data.sources.spec import DataSpec
from openclip_ext.evaluation import datacomp
from openclip_ext.evaluation.open_tasks import retrieval
from openclip_ext.evaluation.report.__main__ import main as run_report
from openclip_ext.evaluation.results import LOG_FILE, read_log
from openclip_ext.training.validation import class_task, kept_task
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


def write_run(folder: Path, tiny_folder: Path, **flags: str) -> dict[str, str]:
    """Write a run folder with the tiny model's checkpoint; return its flags."""
    (folder / "checkpoints").mkdir(parents=True)
    shutil.copy(tiny_folder / "epoch_1.pt", folder / "checkpoints")
    flags = {"model": datasets.TINY_MODEL, "caption_template": "the digit {}", **flags}
    (folder / "config.json").write_text(json.dumps({"resolved": {"flags": flags, "loss": {}}}))
    return flags


def test_pairs_of_class_folders_have_the_captions_of_the_run(photos, tiny_folder, tiny, tmp_path):
    pytest.importorskip("datasets")
    flags = write_run(tmp_path / "run", tiny_folder)
    arguments = [str(tmp_path / "run"), "--val-data", str(photos), "--device", "cpu", "--workers", "0"]
    assert datacomp.main(arguments) == 0
    (line,) = read_log(tmp_path / "run" / "datacomp" / "epoch_1")
    spec = DataSpec(str(photos), caption_template=flags["caption_template"])
    assert line["metrics"] == retrieval("val-data", spec).score(tiny.encoder(workers=0)).metrics


def test_a_run_folder_or_its_checkpoint_is_the_model(photos, tiny_folder, tmp_path):
    table = write_csv(tmp_path, rows=6, columns=("place", "words"))
    flags = write_run(tmp_path / "run", tiny_folder, csv_img_key="place", csv_caption_key="words")
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


def test_columns_of_a_table_are_given_for_a_model_without_a_run(evaluate, tmp_path):
    table = write_csv(tmp_path, rows=6, columns=("place", "words"))
    lines = table.read_text().splitlines()
    table.write_text("\n".join(["remarks\t" + lines[0], *("none\t" + line for line in lines[1:])]))
    assert evaluate("--val-data", table)[0] == 1
    status, found = evaluate("--val-data", table, "--csv-img-key", "place", "--csv-caption-key", "words")
    assert status == 0 and found["val-data"]["samples"] == 6


@pytest.mark.parametrize("case", ["a table with other columns", "prompts beside the data", "--keep-tasks"])
def test_a_run_reads_own_classes_as_in_its_training(case, photos, tiny_folder, tiny, tmp_path):
    place, flags, template = photos, {}, "the digit {}"
    if case == "a table with other columns":
        place = tmp_path / "classes.csv"
        rows = [f"{path},{path.parent.name.replace('_', ' ')}" for path in sorted(photos.rglob("*.png"))]
        place.write_text("\n".join(["image,label", *rows]))
        flags = {"csv_img_key": "place", "csv_caption_key": "words"}
    elif case == "--keep-tasks":
        flags, template = {"keep_tasks": f"other::{photos}"}, "a photo of a {}"
    else:
        (photos / "zeroshot_classification_templates.txt").write_text("{c}\n")
        template = "{}"
    flags = write_run(tmp_path / "run", tiny_folder, **flags)
    assert datacomp.main([str(tmp_path / "run"), "--tasks", str(place), "--device", "cpu", "--workers", "0"]) == 0
    (line,) = read_log(tmp_path / "run" / "datacomp" / "epoch_1")
    assert line["metrics"]["acc1"] == accuracy(tiny, photos, template)
    columns = {name.replace("img", "image"): value for name, value in flags.items() if name.startswith("csv")}
    spec = DataSpec(str(place), caption_template=flags["caption_template"], **columns)
    task = kept_task(str(place)).task if case == "--keep-tasks" else class_task(spec)
    assert task.score(tiny.encoder(workers=0)).metrics == line["metrics"]


@pytest.mark.parametrize("folder", ["{name}", "{number}", "{after}", "class {number}", "Digit_{name}"])
def test_classnames_name_the_folders(folder, evaluate, photos, tiny):
    """If a name is a line, the order of the lines is free. Numbers from 1 follow each other as numbers: 1, 2, ..., 10."""
    expected = accuracy(tiny, photos, "digit {}")
    lines = sorted(NAMES)
    for number, name in enumerate(lines):
        (photos / name).rename(photos / folder.format(name=name, number=number, after=number + 1))
    if "{name}" in folder:
        lines = [folder.format(name=name).replace("_", " ").lower() for name in NAMES]
    (photos / "classnames.txt").write_text("".join(f"{name}\n" for name in lines))
    status, found = evaluate("--tasks", photos, "--template", "{}" if "Digit" in folder else "digit {}")
    assert status == 0 and found["photos"]["metrics"]["acc1"] == expected


def test_a_folder_without_its_line_among_others_is_refused(evaluate, photos, caplog):
    (photos / "classnames.txt").write_text("".join(f"{name}\n" for name in NAMES))
    (photos / "two").rename(photos / "tow")
    assert evaluate("--tasks", photos)[0] == 1 and "tow" in caplog.text


@pytest.mark.parametrize("change", ["image", "image of a class", "shard", "prompts"])
def test_a_result_of_other_data_is_not_kept(change, evaluate, photos, tmp_path):
    table, shards = write_csv(tmp_path, rows=6), write_shards(tmp_path / "shards", [4, 2])
    labels = tmp_path / "labels.csv"
    labels.write_text("\n".join(["image,label", *(f"{path},{path.parent.name}" for path in photos.rglob("*.png"))]))
    (linked := tmp_path / "linked").mkdir()
    for name in NAMES:
        (linked / name).symlink_to(photos / name)
    place = {"image": table, "shard": tmp_path / "shards" / "{00000..00001}.tar", "prompts": labels}.get(change, linked)
    before = evaluate("--tasks", place)[1]
    assert evaluate("--tasks", place)[1] == before
    if change == "shard":
        write_shards(Path(shards[0]).parent, [3, 2])
    elif change == "prompts":
        (tmp_path / "zeroshot_classification_templates.txt").write_text("{c}\n")
    else:
        shutil.copy(next(photos.rglob("*.png")), {"image": tmp_path / "3.jpg"}.get(change, photos / "two" / "x.png"))
    after = evaluate("--tasks", place)[1]
    assert after.keys() == before.keys() and [*after.values()] != [*before.values()]


def test_own_data_with_the_name_of_a_task_of_datacomp_are_another_task(evaluate, photos, tmp_path):
    datasets.make_task(tmp_path / "data", "mnist", count=12)
    own = photos.rename(tmp_path / "mnist")
    arguments = ("--tasks", own, "mnist", "--data-dir", tmp_path / "data", "--allow-size-mismatch")
    status, found = evaluate(*arguments)
    assert status == 0 and {key: line["samples"] for key, line in found.items()} == {"own/mnist": COUNT, "mnist": 12}


@pytest.mark.parametrize("kind", ["csv", "tsv", "jsonl", "parquet", "numbers"])
def test_a_table_of_labels_is_a_task(kind, evaluate, photos, tiny):
    rows = [{"image": str(path), "label": path.parent.name} for path in sorted(photos.rglob("*.png"))]
    path = photos.parent / f"table.{kind}"
    if kind in ("csv", "tsv"):
        separator = "," if kind == "csv" else "\t"
        header = ["image", "label"] if kind == "csv" else ["Image", "Label"]
        lines = [[row["image"], row["label"] + " " * (number % 2)] for number, row in enumerate(rows)]
        path.write_text("\n".join(map(separator.join, [header, *lines])))
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


def test_a_table_of_captions_and_labels_is_a_task_of_labels_with_a_template(evaluate, photos, tmp_path, tiny):
    paths = sorted(photos.rglob("*.png"))
    lines = [f"{path},caption {number},{path.parent.name}" for number, path in enumerate(paths)]
    table = tmp_path / "both.csv"
    table.write_text("\n".join(["image,caption,category", *lines]))
    pairs = write_csv(tmp_path, rows=12)
    _, found = evaluate("--tasks", table)
    assert "mean_R@1" in found["both"]["metrics"] and "acc1" not in found["both"]["metrics"]
    status, found = evaluate("--tasks", table, pairs, "--template", "a photo of a {}")
    assert status == 0 and found["both"]["metrics"]["acc1"] == accuracy(tiny, photos, "a photo of a {}")
    assert "mean_R@1" in found[pairs.stem]["metrics"]


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
    assert evaluate("--tasks", own, "--template", "a {}")[0] == 2, "it would have no effect"
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
        ([], "--data-dir"),
        (["--tasks", "{photos}", "--template", "a photo"], "--template"),
        (["--val-data", "{photos}", "--template", "a photo of a {{}}"], "--template"),
        (["--tasks", "{photos}/zero"], "no folder"),
        (["--tasks", "{photos}/pairs.csv"], "has 0 bytes"),
        (["--val-data", "{photos}/pairs.tar"], "it is empty"),
    ],
)
def test_what_is_no_task_is_one_sentence(arguments, word, evaluate, photos, caplog):
    for name in ("pairs.csv", "pairs.tar"):
        (photos / name).touch()
    status, found = evaluate(*(text.format(photos=photos) if "{photos" in text else text for text in arguments))
    assert status in (1, 2) and found == {}
    assert any(one in caplog.text for one in word.split("|")) and "Traceback" not in caplog.text


def test_gray_images_of_16_bits_are_scaled_as_in_training(evaluate, photos):
    expected = evaluate("--tasks", photos)[1]["photos"]["metrics"]
    deep = photos.parent / "deep" / "photos"
    for path in photos.rglob("*.png"):
        (target := deep / path.relative_to(photos)).parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.asarray(Image.open(path).convert("L")).astype(np.uint16) << 8).save(target)
    assert evaluate("--tasks", deep)[1]["photos"]["metrics"] == expected


def test_gray_images_of_16_bits_are_scaled_in_datacomps_layout(evaluate, tmp_path):
    """There, other images keep their mode, because DataComp's numbers depend on it."""
    images = [image.convert("L") for image in datasets.digit_images(COUNT)[0]]
    found = []
    for name, files in (
        ("8", images),
        ("16", [Image.fromarray(np.asarray(image).astype(np.uint16) << 8) for image in images]),
    ):
        contents = [datasets.image_bytes(image) for image in files]
        samples = [(f"s{row}", {"png": data, "txt": f"digit {row}".encode()}) for row, data in enumerate(contents)]
        place = datasets.write_dataset(tmp_path / name, samples, dataset_type=("retrieval",))
        found.append(evaluate("--tasks", place)[1][name]["metrics"])
    assert found[0] == found[1]


def test_a_label_that_is_missing_is_named(evaluate, photos, caplog):
    path = photos.parent / "table.csv"
    rows = [f"{image},{'' if number == 2 else 'zero'}" for number, image in enumerate(sorted(photos.rglob("*.png")))]
    path.write_text("\n".join(["image,label", *rows]))
    assert evaluate("--tasks", path)[0] == 1
    assert "row 2 has no label" in caplog.text
