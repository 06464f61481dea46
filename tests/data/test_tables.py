"""Parquet and JSON-lines files, saved Hugging Face data sets and class folders as training data."""

import io
import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from openclip_ext.cli.errors import UsageError
from openclip_ext.cli.options import from_flags
from openclip_ext.data.loader.build import build_source
from openclip_ext.data.shards import write as shards
from openclip_ext.data.sources.source import BadSampleError, decode_image
from openclip_ext.data.sources.spec import DataSpec
from openclip_ext.data.sources.table import TableSource
from openclip_ext.evaluation.open_tasks import own_task
from openclip_ext.training.flags import parse
from tests.data.loading import build
from tests.training.runs import metrics_of, run

datasets = pytest.importorskip("datasets")
ROWS = 30


def picture(number: int) -> bytes:
    pixels = np.random.default_rng(number).integers(0, 256, (16, 16, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG")
    return buffer.getvalue()


def columns(**more: list) -> dict[str, list]:
    """Return columns of ``ROWS`` images with captions such as 'sample 3'."""
    images = [{"bytes": picture(number), "path": f"{number}.png"} for number in range(ROWS)]
    return {"image": images, "caption": [f"sample {number}" for number in range(ROWS)], **more}


def write_parquet(folder: Path) -> str:
    datasets.Dataset.from_dict(columns()).to_parquet(folder / "pairs.parquet")
    return str(folder / "pairs.parquet")


def save_data_set(folder: Path) -> str:
    table = datasets.Dataset.from_dict(columns(number=list(range(ROWS))))
    table.cast_column("image", datasets.Image()).save_to_disk(folder / "saved")
    return str(folder / "saved")


def write_json_lines(folder: Path) -> str:
    lines = []
    for number in range(ROWS):
        (folder / f"{number}.png").write_bytes(picture(number))
        lines.append(json.dumps({"path": f"{number}.png", "txt": f"sample {number}"}))
    (folder / "pairs.jsonl").write_text("\n".join(lines))
    return str(folder / "pairs.jsonl")


def write_patterned_parquet(folder: Path) -> str:
    for part in range(3):
        rows = {name: values[part * 10 : part * 10 + 10] for name, values in columns().items()}
        datasets.Dataset.from_dict(rows).to_parquet(folder / f"part-{part}.parquet")
    return str(folder / "part-*.parquet")


TABLES = [write_parquet, save_data_set, write_json_lines, write_patterned_parquet]


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


@pytest.mark.parametrize("write", TABLES)
def test_a_table_has_its_rows_in_order(write, tmp_path):
    source = TableSource(write(tmp_path))
    reader = source.read_one
    assert source.num_samples == ROWS and not source.several_captions
    for row in range(ROWS):
        image, caption = source.decode(reader(row), decode_image)
        assert caption == f"sample {row}"
        assert np.array_equal(np.asarray(image), np.asarray(decode_image(picture(row))))


def write_class_folders(folder: Path) -> str:
    for number in range(12):
        place = folder / "photos" / ("coffee_mug", "kettle")[number % 2]
        place.mkdir(parents=True, exist_ok=True)
        (place / f"{number}.png").write_bytes(picture(number))
    return str(folder / "photos")


def test_class_folders_have_captions_of_a_template(tmp_path):
    spec = DataSpec(write_class_folders(tmp_path))
    assert spec.resolved_type == "table"
    source = TableSource(spec.source, template="a picture of my {}")
    found = {source.decode(source.read_one(row), decode_image)[1] for row in range(12)}
    assert found == {"a picture of my coffee mug", "a picture of my kettle"}


def test_another_image_of_a_class_makes_other_data_and_another_place_does_not(tmp_path):
    """Stored embeddings belong to rows, and a new file moves the rows of its class."""
    folder = Path(write_class_folders(tmp_path))
    before = TableSource(str(folder)).index_digest
    folder = folder.rename(tmp_path / "moved")
    assert TableSource(str(folder)).index_digest == before
    (folder / "kettle" / "1.png").rename(folder / "kettle" / "99.png")
    assert TableSource(str(folder)).index_digest != before


def test_other_images_of_a_file_with_equal_captions_are_other_data(tmp_path):
    path, found = str(tmp_path / "pairs.parquet"), set()
    for first in (0, 1):
        images = [{"bytes": picture(number)[: 100 + number], "path": None} for number in (first, 1 - first)]
        datasets.Dataset.from_dict({"image": images, "caption": ["a kettle"] * 2}).to_parquet(path)
        found.add(TableSource(path).index_digest)
    assert len(found) == 2


def test_class_folders_have_every_image_below_a_folder_and_name_a_broken_one(tmp_path, caplog):
    folder = Path(write_class_folders(tmp_path))
    for place in ("kettle/2024/test_1.PNG", "kettle/train_2.png", "größe 2/val.png"):
        (folder / place).parent.mkdir(parents=True, exist_ok=True)
        (folder / place).write_bytes(picture(0))
    (folder / "kettle" / "broken.jpg").write_bytes(picture(0)[:200])
    for ignored in ("kettle/.hidden.png", "kettle/notes.txt", "readme.txt"):
        (folder / ignored).write_bytes(picture(0))
    (folder / "empty").mkdir()
    (folder / "beside.png").write_bytes(picture(0))
    source = TableSource(str(folder), template="{}")
    assert "beside.png" in caplog.text and "readme.txt" not in caplog.text
    found, bad = [], []
    for row in range(source.num_samples):
        try:
            found.append(source.decode(source.read_one(row), decode_image)[1])
        except BadSampleError as error:
            bad.append(str(error))
    assert {name: found.count(name) for name in found} == {"coffee mug": 6, "kettle": 8, "größe 2": 1}
    assert len(bad) == 1 and "broken.jpg" in bad[0]


def test_parts_of_a_data_set_are_no_classes(tmp_path):
    for part in ("train", "Val"):
        (tmp_path / part / "kettle").mkdir(parents=True)
    for read in (TableSource, lambda path: own_task(path).read()):
        with pytest.raises(ValueError, match="give one of them"):
            read(str(tmp_path))


@pytest.mark.parametrize(
    ("more", "column"),
    [
        ({"caption": [[f"sample {row}", " ", f"other {row}"] for row in range(ROWS)]}, None),
        ({"caption": [None, *([f"sample {row}", f"other {row}"] for row in range(1, ROWS))]}, None),
        ({"second": [f"other {row}" for row in range(ROWS)]}, "caption;second"),
    ],
)
def test_one_of_several_captions_is_drawn(more, column, tmp_path):
    datasets.Dataset.from_dict(columns() | more).to_parquet(tmp_path / "pairs.parquet")
    source = TableSource(str(tmp_path / "pairs.parquet"), caption_column=column)
    assert source.several_captions
    raw = source.read_one(3)
    assert [source.decode(raw, decode_image, draw)[1] for draw in range(3)] == ["sample 3", "other 3", "sample 3"]


def write_hard_negatives(folder: Path, kind: str) -> str:
    """Write a table whose rows have two hard negatives, but row 2 has one, and row 4 has none."""
    hard = {name: [f"hard {row}{name}" for row in range(ROWS)] for name in "12"}
    hard["1"][2] = hard["1"][4] = hard["2"][4] = " "
    if kind == "parquet":
        datasets.Dataset.from_dict(columns(**hard)).to_parquet(folder / "pairs.parquet")
        return str(folder / "pairs.parquet")
    lines = ["filepath\ttitle\t1\t2"]
    for row in range(ROWS):
        (folder / f"{row}.png").write_bytes(picture(row))
        lines.append(f"{row}.png\tsample {row}\t{hard['1'][row]}\t{hard['2'][row]}")
    (folder / "pairs.csv").write_text("\n".join(lines))
    return str(folder / "pairs.csv")


@pytest.mark.parametrize("kind", ["parquet", "csv"])
def test_columns_with_hard_negatives(kind, tmp_path):
    path = write_hard_negatives(tmp_path, kind)
    loader = build(path, hard_negative_key="1;2", max_bad_fraction=0.2)
    found = set()
    for epoch in range(8):
        for batch in loader.iterate(epoch):
            found |= {*zip(batch["index"].tolist(), batch["hard_negative"][:, 0].tolist(), strict=True)}
    expected = {(row, 10 * row + number) for row in range(ROWS) for number in (1, 2)} - {(2, 21), (4, 41), (4, 42)}
    assert found <= expected and len(found) > len(expected) - 6
    with pytest.raises(ValueError, match=r"no column 'nope'.*--hard-negative-key"):
        build(path, hard_negative_key="nope")


@pytest.mark.parametrize(
    ("more", "arguments", "message"),
    [
        ({"title": ["a"] * ROWS}, {}, r"several columns with captions: caption, title.*--csv-caption-key"),
        ({"photo": columns()["image"]}, {}, r"several columns with images: image, photo.*--csv-img-key"),
        ({}, {"caption_column": "captoin"}, "no column 'captoin'; did you mean caption"),
        (
            {},
            {"image_column": "image;caption"},
            r"--csv-img-key 'image;caption' names several columns.*a row for each image",
        ),
    ],
)
def test_unclear_columns_are_refused(more, arguments, message, tmp_path):
    datasets.Dataset.from_dict(columns(**more)).to_parquet(tmp_path / "pairs.parquet")
    with pytest.raises(ValueError, match=message):
        TableSource(str(tmp_path / "pairs.parquet"), **arguments)


def test_a_given_column_may_have_openclips_name(tmp_path):
    """OpenCLIP's default column is title. Given, it decides between several columns."""
    datasets.Dataset.from_dict(columns(title=["other"] * ROWS)).to_parquet(tmp_path / "pairs.parquet")
    flags = parse(["--train-data", str(tmp_path / "pairs.parquet"), "--csv-caption-key", "title"]).flags
    source = build_source(from_flags(DataSpec, flags))
    assert source.describe(source.read_one(3))[1] == "other"


@pytest.mark.parametrize("names", [["a", "b"], {"en": "a", "de": "b"}])
def test_lists_and_texts_by_name_are_captions(names, tmp_path):
    """Next to them, the only column of texts is not certain to have the captions: it may have the inventory number."""
    table = datasets.Dataset.from_dict(columns(names=[names] * ROWS)).rename_column("caption", "inventory")
    table.to_parquet(tmp_path / "pairs.parquet")
    with pytest.raises(ValueError, match=r"several columns with captions: inventory, names.*--csv-caption-key"):
        TableSource(str(tmp_path / "pairs.parquet"))
    source = TableSource(str(tmp_path / "pairs.parquet"), caption_column="names")
    assert source.several_captions and source.row(3)[1] == ["a", "b"]


def test_the_only_column_of_texts_has_the_captions(tmp_path):
    table = datasets.Dataset.from_dict(columns(label=["a"] * ROWS)).rename_column("caption", "Beschreibung")
    table.to_parquet(tmp_path / "pairs.parquet")
    assert TableSource(str(tmp_path / "pairs.parquet")).row(3)[1] == ["sample 3"]


def test_a_file_with_brackets_in_its_name_is_no_pattern(tmp_path):
    for name, count in (("pairs [a].parquet", 3), ("pairs a.parquet", 5)):
        rows = {key: values[:count] for key, values in columns().items()}
        datasets.Dataset.from_dict(rows).to_parquet(tmp_path / name)
    source = TableSource(str(tmp_path / "pairs [a].parquet"))
    assert source.num_samples == 3 and source.files() == [str(tmp_path / "pairs [a].parquet")]


@pytest.mark.parametrize("given", [None, "Foto"])
def test_a_column_of_paths_is_found_by_its_cells_and_has_no_captions(given, tmp_path):
    table = tmp_path / "pairs.jsonl"
    rows = [{"Foto": f"{number}.png", "Titel": f"sample {number}"} for number in range(ROWS)]
    table.write_text("\n".join(map(json.dumps, rows)))
    assert TableSource(str(table), image_column=given).row(3) == ("3.png", ["sample 3"])
    rows[2]["Foto"] = None if given is None else "2"
    table.write_text("\n".join(map(json.dumps, rows)))
    if given is None:
        with pytest.raises(ValueError, match=r"no column with images.*--csv-img-key"):
            TableSource(str(table))
    else:
        assert TableSource(str(table), image_column=given).row(3) == ("3.png", ["sample 3"])


@pytest.mark.parametrize("write", [write_parquet, save_data_set, write_json_lines, write_class_folders])
def test_shards_of_a_table_have_its_samples(write, tmp_path, capsys):
    table, folder = write(tmp_path), tmp_path / "shards"
    shards.main([table, str(folder), "--samples", "8"])
    assert f"'{folder}/*.tar'" in capsys.readouterr().out
    expected, found = (build_source(DataSpec(data)) for data in (table, f"{folder}/*.tar"))
    assert found.num_samples == expected.num_samples and len([*folder.glob("*.tar")]) > 1
    for index in range(found.num_samples):
        (image, caption), (other, text) = (one.decode(one.read_one(index), decode_image) for one in (expected, found))
        assert caption == text and np.array_equal(image, other)
    with pytest.raises(UsageError, match="not empty"):
        shards.main([table, str(folder)])


def test_texts_and_lists_in_one_column_and_urls(tmp_path):
    lines = [
        {"path": "https://example.org/0.png", "txt": "sample 0"},
        {"path": "1.png", "txt": ["sample 1", "other 1"]},
    ]
    (tmp_path / "pairs.jsonl").write_text("\n".join(map(json.dumps, lines)))
    (tmp_path / "1.png").write_bytes(picture(1))
    source = TableSource(str(tmp_path / "pairs.jsonl"), "path", "txt")
    assert source.several_captions
    assert [source.decode(source.read_one(1), decode_image, draw)[1] for draw in (0, 1)] == ["sample 1", "other 1"]
    with pytest.raises(BadSampleError, match="URL"):
        source.decode(source.read_one(0), decode_image)


def test_shards_keep_all_captions_and_leave_out_bad_rows(tmp_path, capsys):
    several = [[f"{number}", f"{number} again"] for number in range(ROWS)]
    data = columns(captions=several)
    data["image"][3] = {"bytes": b"no image", "path": "3.png"}
    image = io.BytesIO()
    Image.new("RGB", (9, 9), "red").save(image, "BMP")
    data["image"][5] = {"bytes": image.getvalue(), "path": "5.bmp"}
    datasets.Dataset.from_dict(data).to_parquet(tmp_path / "pairs.parquet")
    shards.main([str(tmp_path / "pairs.parquet"), str(tmp_path / "out"), "--csv-caption-key", "captions"])
    shown = capsys.readouterr().out
    assert "1 rows are left out" in shown and "--draw-captions" in shown
    source = build_source(DataSpec(f"{tmp_path}/out/*.tar", caption_key="json:captions"))
    assert source.num_samples == ROWS - 1
    decoded = [
        [source.decode(source.read_one(index), decode_image, draw)[1] for draw in (0, 1)] for index in range(ROWS - 1)
    ]
    assert decoded == several[:3] + several[4:]


def test_what_is_no_table_is_one_sentence(tmp_path):
    (tmp_path / "pairs.parquet").write_text("no parquet")
    with pytest.raises(ValueError, match="cannot be read as a table"):
        TableSource(str(tmp_path / "pairs.parquet"))
    for name in ("empty.jsonl", "empty.parquet"):
        (tmp_path / name).touch()
        with pytest.raises(ValueError, match=f"the data set is empty: .*{name} has 0 bytes"):
            TableSource(str(tmp_path / name))
    datasets.DatasetDict(train=datasets.Dataset.from_dict(columns())).save_to_disk(tmp_path / "both")
    with pytest.raises(ValueError, match=r"give one of them, .*both/train"):
        TableSource(str(tmp_path / "both"))


def test_a_run_trains_and_validates_on_tables(tmp_path):
    more = "--loss queueclip --equal-captions mask --hard-negative-key 1;2"
    data = ["--train-data", write_hard_negatives(tmp_path, "parquet"), "--val-data", write_class_folders(tmp_path)]
    model = "--model demo-vit --precision fp32 --device cpu --workers 1 --batch-size 10 --epochs 2 --warmup 1"
    assert run([*data, *model.split(), *more.split(), "--logs", str(tmp_path / "logs"), "--name", "run"]) == 0
    lines = metrics_of(tmp_path / "logs" / "run")
    assert sum("loss" in line for line in lines) > 0
    evaluations = [line["evaluation"] for line in lines if "evaluation" in line]
    assert evaluations[-1]["num_samples"] == 12
