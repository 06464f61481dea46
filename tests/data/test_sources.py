"""The training loader with its other sources: remote and compressed shards, CSV files and synthetic data."""

import gzip
import re
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image

from openclip_ext.data.loader.build import build_source
from openclip_ext.data.sources.source import decode_image
from openclip_ext.data.sources.spec import DataSpec
from openclip_ext.data.sources.synthetic import CAPTION
from tests.data.loading import build, indices
from tests.data.shards import write_csv, write_shards, write_sizes

COUNTS = [20, 11, 9]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_shards(tmp_path / "data", COUNTS)
    write_sizes(tmp_path / "data", COUNTS)
    return tmp_path / "data"


def remote(folder: Path) -> str:
    return f"pipe:cat {folder}/{{00000..00002}}.tar"


# ------------------------------------------------------------------ remote shards


def test_a_stream_with_fewer_samples_than_promised(folder: Path, caplog: pytest.LogCaptureFixture):
    """The next epoch reads it again, because the connection may have ended early."""
    write_sizes(folder, [20, 11, 12])
    loader = build(remote(folder), batch_size=1, max_bad_fraction=0.1)
    found = indices(list(loader.iterate(0)))
    assert len(found) == loader.num_samples == 43 and set(found) == set(range(40))
    assert (
        "the shard has 9 samples, but the manifest has 12" in caplog.text
        and "which the next epoch retries" in caplog.text
    )


def test_a_stream_with_more_samples_than_promised(folder: Path, caplog: pytest.LogCaptureFixture):
    """The additional samples have no index, so they are dropped. A warning must report this."""
    write_sizes(folder, [20, 5, 9])
    found = indices(list(build(remote(folder), batch_size=2).iterate(0)))
    assert sorted(found) == list(range(34))
    (warning,) = [record.message for record in caplog.records if "more than" in record.message]
    assert "00001.tar has more than the 5 samples of the manifest" in warning
    assert "is too low: correct it" in warning


# ------------------------------------------------------------------ CSV


def test_csv_captions_are_text(tmp_path: Path):
    """By default, pandas would read these captions as missing values and as numbers."""
    from openclip_ext.data.sources.csv import CsvSource

    path = write_csv(tmp_path, rows=4)
    captions = ["NA", "None", "17", "naïve 日本"]
    lines = path.read_text().splitlines()
    lines[1:] = [line.rpartition("\t")[0] + "\t" + text for line, text in zip(lines[1:], captions, strict=True)]
    path.write_text("\n".join(lines))
    source = CsvSource(str(path), "filepath", "title")
    reader = source.read_one
    assert [source.decode(reader(row), decode_image)[1] for row in range(4)] == captions
    # The digests must be the same in every version: otherwise runs of earlier versions could not resume.
    path.write_text("filepath\ttitle\n0.jpg\ta\nb/1.jpg\tcat\n")
    source = CsvSource(str(path), "filepath", "title")
    assert (source.digest, source.index_digest) == ("8d93aa7a0af4cdf4", "3d42afcb11ee99cb")


def test_several_caption_columns_of_a_csv_file(tmp_path: Path):
    path = write_csv(tmp_path, rows=4)
    rows = [
        line + f"\t{'' if number == 1 else f'other {number - 1}'}"
        for number, line in enumerate(path.read_text().split("\n")[:-1])
    ]
    path.write_text("\n".join(["number\tfilepath\ttitle\tdescription", *rows[1:]]) + "\n")
    source = build_source(DataSpec(str(path), csv_caption_key="title; description"))
    raws = [*source.read([np.arange(4)])]
    assert [source.decode(raws[2], decode_image, draw)[1] for draw in range(3)] == ["sample 2", "other 2", "sample 2"]
    assert source.decode(raws[0], decode_image, 1)[1] == "sample 0", "a blank caption is never drawn"
    assert source.several_captions
    with pytest.raises(ValueError, match="--csv-caption-key"):
        build_source(DataSpec(str(path), csv_caption_key="title;detail"))


def test_csv_rows_that_a_quote_hides_are_refused(tmp_path: Path):
    """After an opening quote, pandas reads all lines up to the next quote as one caption, so rows would disappear."""
    path = write_csv(tmp_path)
    whole = path.read_text()
    path.write_text(whole.replace("sample 5\n", '"sample 5\n').replace("sample 20\n", 'a "sample" 20\n'))
    with pytest.raises(ValueError, match=r"'title' of row 5 has 16 lines.*check the quotes.*--csv-separator"):
        build(str(path))
    # A quoted caption may contain a few lines.
    path.write_text(whole.replace("sample 5\n", '"a ""dog"", 5 cm high.\nIt sits,\tsee 5 jpg"\n'))
    assert build(str(path)).num_samples == 30


@pytest.mark.parametrize(
    ("header", "flags", "found"),
    [
        ("filepath\ttitle", {}, ("filepath", "title")),
        ("filepath\ttitle\tpath\ttext", {}, ("filepath", "title")),
        ("path,title,description", {}, ("path", "title")),
        ("Image;Caption", {}, ("Image", "Caption")),
        ("file_name|id|text", {}, ("file_name", "text")),
        ("path,a,b", {"csv_caption_key": "b"}, ("path", "b")),
        ("Foto;Beschreibung", {}, ("Foto", "Beschreibung")),
        ("Foto;Beschreibung;label", {}, ("Foto", "Beschreibung")),
        ("path,label", {}, "--csv-caption-key label"),
        ("Foto,id,title", {}, ("Foto", "title")),  # the cells are names of image files
        ("a,b", {"csv_separator": ",", "csv_image_key": "a", "csv_caption_key": "b"}, ("a", "b")),
        ("path,caption,text", {}, "--csv-separator , --csv-img-key path --csv-caption-key caption"),
        ("path,image,text", {"csv_separator": ","}, "add --csv-img-key path --csv-caption-key text"),
        ("path,a,b", {}, "--csv-separator , --csv-img-key path --csv-caption-key COLUMN"),  # a may be a product number
        ("path,text", {"csv_caption_key": "nosuch"}, "no column 'nosuch'"),
        ("path,text", {"csv_caption_key": "title"}, "no column 'title'"),  # also if the default is given
        ("a;b;text", {}, "--csv-separator ';' --csv-img-key COLUMN --csv-caption-key text"),
        ("path,title", {"csv_caption_key": "text"}, "--csv-caption-key title"),
        ("path,title", {"csv_separator": ";"}, "--csv-img-key COLUMN"),
        ("a,b,title", {"csv_image_key": "a;b"}, "--csv-img-key 'a;b' names several columns"),
        ("a,b,title", {"csv_image_key": "a;b", "csv_caption_key": "title"}, "write a row for each image"),
    ],
)
def test_separator_and_columns_of_a_csv_file(
    tmp_path: Path, caplog: Any, header: str, flags: dict[str, str], found: Any
):
    """Unique names are detected and logged. Otherwise, the error has the finished flags. Given flags win."""
    caplog.set_level("INFO")
    separator = next(mark for mark in "\t,;|" if mark in header)
    columns = header.split(separator)
    expected = [str(tmp_path / "0.png"), "sample 0"]
    Image.new("RGB", (8, 8)).save(expected[0])
    values = dict(zip(found, expected, strict=True)) if isinstance(found, tuple) else {}
    row = separator.join(values.get(name, "x") for name in columns)
    (tmp_path / "t.csv").write_text(f"{header}\n{row}\n")
    spec = DataSpec(str(tmp_path / "t.csv"), **flags)
    if isinstance(found, str):
        with pytest.raises(ValueError, match=re.escape(found)):
            build_source(spec)
        return
    source = build_source(spec)
    assert [*source.describe(source.read_one(0))] == expected
    was_detected = {"csv_image_key": "filepath", "csv_caption_key": "title", "csv_separator": "\t"} | flags != {
        "csv_image_key": found[0],
        "csv_caption_key": found[1],
        "csv_separator": separator,
    }
    assert (f"{found[0]!r}" in caplog.text) == was_detected


def test_a_column_of_numbers_has_no_captions(tmp_path: Path):
    path = tmp_path / "t.csv"
    path.write_text("photo,age\n0.png,54\n1.png,6.5\n")
    with pytest.raises(ValueError, match="--csv-caption-key age"):
        build_source(DataSpec(str(path)))
    Image.new("RGB", (8, 8)).save(tmp_path / "0.png")
    path.write_text("photo,age,finding\n0.png,54,a cyst\n1.png,6.5,none\n")
    source = build_source(DataSpec(str(path)))
    assert source.describe(source.read_one(0)) == ("0.png", "a cyst")


@pytest.mark.parametrize(
    "form", ["{}", "sub/../{}", "file://FOLDER/{}", "file:FOLDER/{}", "~/data/{}", "FOLDER/{}", ".\\{}"]
)
@pytest.mark.parametrize("in_folder", [False, True])
def test_forms_of_image_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str, in_folder: bool):
    """Paths are relative to the working directory or, if there is no such file, to the table's folder."""
    folder = tmp_path / "data"
    (folder / "sub").mkdir(parents=True)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(folder if in_folder else tmp_path)
    table = folder / "t.tsv"
    name = "a%20b.png" if form.startswith("file:") else "a b.png"
    table.write_text("filepath\ttitle\n" + form.replace("FOLDER", str(folder)).format(name) + "\tsample 0\n")
    Image.new("RGB", (8, 8), "red").save(folder / "a b.png")
    source = build_source(DataSpec(str(table)))
    image, _ = source.decode(source.read_one(0), decode_image)
    assert image.getpixel((0, 0)) == (255, 0, 0)
    assert Path(source.files()[1]).samefile(folder / "a b.png")


@pytest.mark.parametrize(
    ("image", "caption", "word"),
    [
        ("https://example.com/{}.png", "a", "img2dataset"),
        ("s3://bucket/{}.png", "a", "img2dataset"),
        ("C:\\images\\{}.png", "a", "table's folder"),
        ("missing/{}.png", "a", "table's folder"),
        ("0.png", '["red {}", "crimson"]', "a column for each caption"),
        ("0.png", "['red {}', 'crimson']", "a column for each caption"),
    ],
)
def test_first_rows_that_cannot_be_read_are_refused(tmp_path: Path, image: str, caption: str, word: str):
    Image.new("RGB", (8, 8)).save(tmp_path / "0.png")
    rows = [{"filepath": image.format(row), "title": caption.format(row)} for row in range(30)]
    pd.DataFrame(rows).to_csv(tmp_path / "t.csv", sep="\t", index=False)
    with pytest.raises(ValueError, match=word):
        build(str(tmp_path / "t.csv"))
    rows[3] |= {"filepath": "0.png", "title": "[red]"}  # single rows only count as bad
    pd.DataFrame(rows).to_csv(tmp_path / "t.csv", sep="\t", index=False)
    assert build(str(tmp_path / "t.csv")).num_samples == 30


# ------------------------------------------------------------------ synthetic


def test_synthetic_data():
    def first_pixel(image: Image.Image) -> torch.Tensor:
        return torch.tensor([*image.size, *image.getpixel((0, 0))])

    def lengths(texts: list[str]) -> torch.Tensor:
        return torch.tensor([[len(text)] * 3 for text in texts])

    loader = build(None, first_pixel, lengths, dataset_type="synthetic", num_samples=20, batch_size=8)
    batches = list(loader.iterate(0))
    assert (loader.num_samples, len(batches)) == (20, 2)
    assert len(set(indices(batches))) == 16
    assert batches[0]["image"].tolist() == [[224, 224, 0, 0, 0]] * 8
    assert batches[0]["text"].tolist() == [[len(CAPTION)] * 3] * 8


def test_a_csv_that_cannot_be_used_is_refused(tmp_path: Path):
    with pytest.raises(ValueError, match="the data set is empty"):
        build(str(write_csv(tmp_path, rows=0)))
    (tmp_path / "empty.csv").touch()
    with pytest.raises(ValueError, match=r"the data set is empty: .*empty\.csv has 0 bytes"):
        build(str(tmp_path / "empty.csv"))
    # pandas would take the first field of each row as its name, and shift the others.
    (tmp_path / "wide.csv").write_text("filepath,title\n0.jpg,a dog, asleep\n1.jpg,a cat\n")
    with pytest.raises(ValueError, match=r"first row has more fields than the header \['filepath', 'title'\]: quote"):
        build(str(tmp_path / "wide.csv"), csv_separator=",")
    (tmp_path / "cut.csv.gz").write_bytes(gzip.compress(b"filepath\ttitle\n0.jpg\ta\n")[:-9])
    for path in (str(tmp_path / "cut.csv.gz"), write_shards(tmp_path, [4])[0]):
        with pytest.raises(ValueError, match=r"\.(gz|tar) is not UTF-8 text or not CSV \("):
            build(path, dataset_type="csv")
