"""The embed command writes one row per sample index. Rows are also correct after a kill and with several ranks."""

import csv
import json
import multiprocessing
import os
import shutil
import signal
from collections import namedtuple
from pathlib import Path
from unittest import mock

import pytest
import torch

from openclip_ext.cli import command_line
from openclip_ext.cli.errors import UsageError
from openclip_ext.data.loader.build import build_source
from openclip_ext.data.manifest.find import find_or_create_manifest
from openclip_ext.data.reference import EmbeddingStore
from openclip_ext.data.sources.source import decode_image
from openclip_ext.data.sources.spec import DataSpec
from openclip_ext.evaluation import embed
from openclip_ext.evaluation import search as search_command
from openclip_ext.evaluation.models import OpenedModel
from openclip_ext.files import json_lines
from tests.data.shards import sample_members, undecodable, write_csv, write_shards
from tests.distributed.pool import FORKS, two_ranks
from tests.evaluation.datasets import TINY_MODEL
from tests.training.runs import contents

# Tar members of bad samples, by sample number. All samples of the fourth shard (18 to 21) are bad.
BAD = {number: undecodable(number) for number in (3, 18, 19, 20, 21)} | {9: sample_members(9, ["txt"])}


@pytest.fixture(scope="module")
def command(tmp_path_factory: pytest.TempPathFactory, tiny_folder: Path):
    """Return a function that builds the command's arguments from an output folder and more flags; the data come first."""
    write_shards(data := tmp_path_factory.mktemp("data"), [7, 5, 6, 4, 3], BAD)
    model = f"--model {TINY_MODEL} --pretrained {tiny_folder}/epoch_1.pt --model-config {tiny_folder}/{TINY_MODEL}.json"
    size = "--device cpu --precision fp32 --batch-size 4 --workers 0 --max-bad-fraction 0.3"
    return lambda output, *more: [f"{data}/*.tar", *model.split(), *size.split(), "--output", str(output), *more]


def written(folder: Path) -> dict[str, bytes]:
    return {name: content for name, content in contents(folder).items() if name != ".lock"}


@pytest.fixture(scope="module")
def whole(command, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of an uninterrupted run in one process."""
    embed.main(command(folder := tmp_path_factory.mktemp("whole")))
    return folder


def assert_rows(folder: Path, tiny: OpenedModel, spec: DataSpec, bad: set[int]) -> dict:
    source = build_source(spec)
    store, read = EmbeddingStore.open(folder, source.num_samples, source.index_digest), source.read_one
    for index in range(source.num_samples):
        rows = torch.cat(store.rows(torch.tensor([index]))).float()
        if index in bad:
            assert not rows.any()
            continue
        image, caption = source.decode(read(index), decode_image)
        with torch.no_grad():
            images = tiny.model.encode_image(tiny.transform(image)[None], normalize=True)
            texts = tiny.model.encode_text(tiny.tokenizer([caption]), normalize=True)
        torch.testing.assert_close(rows, torch.cat([images, texts]), atol=1e-3, rtol=0)
    return store.about


def test_rows_are_the_models_and_those_of_bad_samples_zero(whole, command, tiny):
    about = assert_rows(whole, tiny, DataSpec(command(whole)[0]), set(BAD))
    assert written(whole).keys() == {"images.npy", "texts.npy", "embeddings.json", "keys.csv"}
    with (whole / "keys.csv").open() as file:
        names = {int(line["index"]): line for line in csv.DictReader(file)}
    source = build_source(DataSpec(command(whole)[0]))
    assert names.keys() == {*range(25)} - {*BAD}
    for index, line in names.items():
        assert (line["key"], line["caption"]) == source.describe(source.read_one(index))
        assert Path(source.group_of(index)[0]).stem in line["shard"]
    expected = {"model": TINY_MODEL, "weights": tiny.weights_sha256, "unreadable": len(BAD), "caption_key": "txt"}
    assert about | expected | {"logit_scale": tiny.model.logit_scale.exp().item()} == about


def test_left_out_samples_and_csv_files_have_rows_too(command, tiny, tmp_path):
    shards, *flags = command(tmp_path / "shards", "--manifest", str(fewer := tmp_path / "fewer.json"))
    find_or_create_manifest(shards).without([4, 5]).save(fewer)
    embed.main([shards, *flags])
    assert_rows(tmp_path / "shards", tiny, DataSpec(shards), set(BAD))
    table = str(write_csv(tmp_path, rows=10))
    (tmp_path / "7.jpg").unlink()
    with mock.patch.object(embed, "_BLOCK", 4):
        embed.main([table, *command(tmp_path / "csv", "--workers", "2")[1:]])
    assert_rows(tmp_path / "csv", tiny, DataSpec(table), {7})
    embed.main([table, *command(tmp_path / "csv", "--workers", "2")[1:]])  # the folder is finished already
    assert build_source(DataSpec(table, reference=tmp_path / "csv")).reference is not None
    columns = tmp_path / "columns.csv"
    columns.write_text(Path(table).read_text().replace("title", "caption", 1))
    for options in ({}, {"csv_caption_key": "caption"}):  # the content of the columns counts, not their names
        build_source(DataSpec(str(columns), reference=tmp_path / "csv", **options))
    with pytest.raises(UsageError, match="expected data"):
        build_source(DataSpec(str(columns), csv_caption_key="number", reference=tmp_path / "csv"))


def killed(argv: list[str], after: int) -> None:
    """Run the command, and kill this process by SIGKILL after batch ``after + 1``."""
    multiprocessing.set_start_method(None, force=True)  # data workers must not come from the fork server
    rows = embed._rows

    def rows_and_die(*arguments):
        for batch in rows(*arguments):
            yield batch
            if next(calls, None) is None:
                os.kill(os.getpid(), signal.SIGKILL)

    calls = iter(range(after))
    with mock.patch.object(embed, "_rows", rows_and_die):
        embed.main(argv)


def test_killed_runs_continue_after_a_shard_to_the_same_bytes(whole, command, tmp_path, capsys):
    argv = command(tmp_path, "--workers", "0")
    (process := FORKS.Process(target=killed, args=(argv, 4))).start()
    process.join(timeout=120)
    assert process.exitcode == -signal.SIGKILL
    assert [line["begin"] for line in json_lines.read(tmp_path / "progress-0.jsonl")] == [0, 7]
    with pytest.raises(UsageError, match="not finished"):
        EmbeddingStore.open(tmp_path)
    with mock.patch.object(embed, "EvalLoader", wraps=embed.EvalLoader) as loader:
        embed.main(argv)
    assert loader.call_args_list[0].kwargs["span"].start == 12
    assert written(tmp_path) == written(whole)
    embed.main(argv)
    assert "is finished already" in capsys.readouterr().out


def refused(argv: list[str]) -> None:
    with pytest.raises(UsageError, match=r"^6 of 25 samples .*more than the allowed 20.0%"):
        embed.main(argv)


def test_two_ranks_write_what_one_does(whole, command, tmp_path):
    """The limit of bad samples applies to all ranks together: neither rank has more than five bad samples."""
    two_ranks().run(refused, command(tmp_path, "--max-bad-fraction", "0.2"), group=False)
    for _ in range(2):  # in the second run, the folder is complete
        two_ranks().run(embed.main, command(tmp_path), group=False)
    assert written(tmp_path) == written(whole)


@pytest.mark.parametrize("is_finished", [True, False])
def test_folders_that_do_not_fit_are_refused(is_finished, command, tiny_folder, tmp_path):
    finish = embed.EmbeddingFolder.finish if is_finished else lambda *_: None
    with mock.patch.object(embed.EmbeddingFolder, "finish", finish):
        embed.main(command(tmp_path))
    others = {
        "weights": f"--pretrained={tiny_folder}/epoch_2.pt",
        "caption_key is txt, ": "--caption-key=txt;json:caption",
    }
    for message, flag in (others | {"config": "--force-quick-gelu"}).items():
        with pytest.raises(UsageError, match=f"has different embeddings: their {message}"):
            embed.main(command(tmp_path, flag))
    os.truncate(tmp_path / "texts.npy", 300)
    with pytest.raises(UsageError, match=r"texts.npy: missing or truncated"):
        embed.main(command(tmp_path))


def test_bad_data_and_a_small_disk_are_refused(command, tmp_path, monkeypatch, capsys):
    with pytest.raises(UsageError, match=r"^6 of 25 samples .*more than the allowed 10.0%"):
        embed.main(command(tmp_path / "a", "--max-bad-fraction", "0.1"))
    (tmp_path / "a" / "begun.json").unlink()
    with pytest.raises(UsageError, match=r"images.npy exists and belongs to another program"):
        embed.main(command(tmp_path / "a"))
    monkeypatch.setattr("shutil.disk_usage", lambda _: namedtuple("usage", "free")(25 * 16 * 4 - 1))
    monkeypatch.setattr("sys.argv", ["embed", *command(tmp_path / "b")])
    with pytest.raises(SystemExit) as stopped:
        command_line.run(embed.main)
    assert (
        stopped.value.code == 2 and "25 samples of width 16 need 1 MiB, but only 0 MiB are" in capsys.readouterr().err
    )


def search(capsys, *arguments: object) -> list[list[str]]:
    """Run the command, and return the cells of the printed samples."""
    search_command.main([str(argument) for argument in arguments])
    return [line.split("  ") for line in capsys.readouterr().out.splitlines() if line[:2] in ("0.", "1.", "-0")]


@pytest.mark.parametrize("kind", ["text", "image"])
def test_search_finds_the_nearest_images(kind, whole, command, tiny, tmp_path, capsys):
    source = build_source(DataSpec(command(whole)[0]))
    image, caption = source.decode(source.read_one(7), decode_image)
    image.save(tmp_path / "query.png")
    query = caption if kind == "text" else tmp_path / "query.png"
    found = search(capsys, whole, query, "--top", "3", "--output", tmp_path / "page.html")
    with torch.no_grad():
        inputs = tiny.model.encode_text(tiny.tokenizer([caption]), normalize=True)
        if kind == "image":
            inputs = tiny.model.encode_image(tiny.transform(image)[None], normalize=True)
    images = torch.from_numpy(EmbeddingStore.open(whole).images.astype("float32"))
    values, rows = (images @ inputs[0]).masked_fill(~images.any(dim=1), -1).topk(3)
    assert [int(line[1]) for line in found] == rows.tolist()
    assert [float(line[0]) for line in found] == pytest.approx(values.tolist(), abs=1e-3)
    assert [tuple(line[3:]) for line in found] == [source.describe(source.read_one(row)) for row in rows.tolist()]
    assert kind == "text" or found[0][1] == "7"
    page = (tmp_path / "page.html").read_text()
    assert page.count("data:image/jpeg") == 3 and found[0][3] in page


def test_search_takes_no_missing_image_for_a_text(whole):
    with pytest.raises(UsageError, match=r"none\.JPG.*not found"):
        search_command.main([str(whole), "photos/none.JPG"])


def test_search_refuses_other_weights_and_works_without_the_data(whole, tiny_folder, tmp_path, capsys):
    with pytest.raises(UsageError, match="--pretrained"):
        search_command.main([str(whole), "a", "--pretrained", str(tiny_folder / "epoch_2.pt")])
    found = search(capsys, whole, "a", "--train-data", tmp_path / "none.tar", "--output", tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    assert len(found) == 25 - len(BAD) and "data:image" not in page and "--train-data" in page


def test_a_run_folder_has_the_model_and_the_columns(command, tiny_folder, tmp_path):
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    shutil.copy(tiny_folder / "epoch_1.pt", tmp_path / "run" / "checkpoints")
    (tmp_path / "run" / "config.json").write_text(
        json.dumps({"resolved": {"flags": {"model": TINY_MODEL, "csv_caption_key": "Größe"}, "loss": {}}})
    )
    table = write_csv(tmp_path, rows=4, columns=("filepath", "Größe"))
    _, _, _, _, _, *others = command(tmp_path / "out")
    embed.main([str(table), str(tmp_path / "run"), *others])
    assert EmbeddingStore.open(tmp_path / "out").about["pretrained"].endswith("epoch_1.pt")
    with (tmp_path / "out" / "keys.csv").open(encoding="utf-8") as file:
        assert [line["caption"] for line in csv.DictReader(file)] == [f"sample {row}" for row in range(4)]
