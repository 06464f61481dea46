"""``openclip-ext inspect``: its categories, compared with a naive computation, its files, and training on the kept samples."""

import csv
import io
import json
import math
import os
import re
import shutil
import statistics
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from openclip_ext.cli.errors import UsageError
from openclip_ext.data.manifest.manifest import Manifest
from openclip_ext.data.reference import EmbeddingStore
from openclip_ext.diagnostics.finished_run import embed_training_set, load_run
from openclip_ext.diagnostics.inspect import __main__ as inspect
from openclip_ext.diagnostics.inspect import findings
from openclip_ext.diagnostics.inspect.findings import DEFINITIONS, PAIRS, Found, Thresholds, find, log_normalizers
from openclip_ext.evaluation.embed import main as write_reference
from openclip_ext.evaluation.encoder import Embeddings, Encoder, tables
from openclip_ext.export import __main__ as export
from openclip_ext.files.writing import file_lock
from openclip_ext.losses.registry import create_loss
from tests.data.shards import write_csv
from tests.references import contrastive as reference
from tests.training.runs import NUM_SAMPLES, command, contents, run

ROWS, WIDTH = 60, 6
CPU = torch.device("cpu")
LOOSE = Thresholds(duplicate_image=0.8, duplicate_caption=0.7, false_negative_quantile=0.4, deviations=1.0, extremes=7)


def make_embeddings() -> Embeddings:
    """Return embeddings of pairs in 12 groups of similar pairs. Rows 3 and 40 are equal; rows 5 and 6 share a caption."""
    random = torch.Generator().manual_seed(0)
    group = torch.randn(12, WIDTH, generator=random)[torch.arange(ROWS) % 12]
    image, text = (group + 0.6 * torch.randn(ROWS, WIDTH, generator=random) for _ in range(2))
    image[40], text[40], text[6] = image[3], text[3], text[5]
    image, text = (torch.nn.functional.normalize(side, dim=1) for side in (image, text))
    return Embeddings(image, text, torch.arange(ROWS) * 2, logit_scale=10.0)


def naive_pairs(embeddings: Embeddings, anchors: list[int], limits: Thresholds) -> dict[str, dict]:
    x, y = embeddings.image.double(), embeddings.text.double()
    own = [float(x[i] @ y[i]) for i in range(ROWS)]
    floor = np.quantile(own, limits.false_negative_quantile)
    found: dict[str, dict] = {name: {} for name in PAIRS if name != "copies"}
    for i in range(ROWS):
        for j in range(i + 1, ROWS):
            if i not in anchors and j not in anchors:
                continue
            images, captions = float(x[i] @ x[j]), float(y[i] @ y[j])
            crossed = max(float(x[i] @ y[j]), float(x[j] @ y[i]))
            if images >= limits.duplicate_image:
                found["duplicate-images"][i, j] = images
            if captions >= limits.duplicate_caption:
                found["duplicate-captions"][i, j] = captions
            if images >= limits.duplicate_image and captions >= limits.duplicate_caption:
                found["duplicates"][i, j] = min(images, captions)
            if crossed >= max(own[i], own[j]) - 1e-6 and crossed >= floor:
                found["false-negatives"][i, j] = crossed
    return found


def naive_misfits(own: Tensor, other: Tensor, anchors: list[int], deviations: float) -> dict[tuple[int, int], float]:
    best = {}
    for i in anchors:
        fits = [float(own[i].double() @ other[j].double()) for j in range(ROWS)]
        best[i, fits.index(max(fits))] = max(fits)
    median = statistics.median(best.values())
    spread = 1.4826 * statistics.median(abs(value - median) for value in best.values())
    return {pair: value for pair, value in best.items() if value < median - deviations * spread}


def as_dict(found: Found) -> dict[tuple[int, int], float]:
    return {(first, second): value for first, second, value in found.entries()}


@pytest.mark.parametrize("chunks", [(2048, 8192), (7, 11)])
@pytest.mark.parametrize("anchors", [list(range(ROWS)), [0, 3, 5, 17, 18, 30, 31, 44, 59]])
def test_every_category_is_the_naive_one(monkeypatch, chunks, anchors):
    monkeypatch.setattr(findings, "_ROWS", chunks[0])
    monkeypatch.setattr(findings, "_COLUMNS", chunks[1])
    embeddings = make_embeddings()
    difficulty = torch.randn(len(anchors), generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    found = find(embeddings, torch.tensor(anchors), difficulty, LOOSE, CPU)
    assert found.keys() == DEFINITIONS.keys() - {"copies"}
    for name, expected in naive_pairs(embeddings, anchors, LOOSE).items():
        assert 0 < found[name].count == len(expected), name
        assert as_dict(found[name]) == pytest.approx(expected, abs=1e-5)
        assert (np.diff(found[name].value) <= 0).all(), "expected decreasing similarity"
    image, text = embeddings.image, embeddings.text
    for name, sides in {"misfit-captions": (text, image), "misfit-images": (image, text)}.items():
        expected = naive_misfits(*sides, anchors, LOOSE.deviations)
        assert 0 < found[name].count == len(expected), name
        assert as_dict(found[name]) == pytest.approx(expected, abs=1e-5)
    by_difficulty = [anchors[place] for place in difficulty.argsort().tolist()]
    assert found["easiest"].samples[:, 0].tolist() == by_difficulty[:7]
    assert found["hardest"].samples[:, 0].tolist() == by_difficulty[::-1][:7]


def test_all_pairs_are_counted_and_the_most_similar_listed(monkeypatch):
    everything, few = torch.arange(ROWS), Thresholds(**{**vars(LOOSE), "max_pairs": 4})
    exact = Thresholds(**{**vars(few), "duplicate_image": 1.0, "duplicate_caption": 1.0})
    whole = find(make_embeddings(), everything, torch.zeros(ROWS), LOOSE, CPU)["duplicate-images"]
    monkeypatch.setattr(findings, "_ROWS", 5)
    part = find(make_embeddings(), everything, torch.zeros(ROWS), few, CPU)["duplicate-images"]
    assert part.count == whole.count > 4
    assert as_dict(part) == dict(list(as_dict(whole).items())[:4])
    # With equal embeddings, all pairs have the same similarity, but only four pairs are listed.
    embeddings = make_embeddings()
    for start in embeddings.image[:9].clone():  # float32 products round some of these embeddings differently
        embeddings.image[:], embeddings.text[:] = start, start.flip(0)
        tied = find(embeddings, everything, torch.zeros(ROWS), exact, CPU)
        for name in {*PAIRS} - {"copies"}:
            assert tied[name].count == ROWS * (ROWS - 1) // 2 and len(as_dict(tied[name])) == 4, name
            assert all(first < second for first, second in as_dict(tied[name]))


def test_of_a_pair_the_first_stays_and_no_pair_stays_whole():
    pairs = [(1, 4), (4, 9), (2, 9), (0, 1), (8, 9)]
    # 1 is removed as a duplicate of 0, so 4 is not a duplicate of a kept sample. 9 is removed as a duplicate of 4.
    assert Found(5, np.array(pairs), np.ones(5)).redundant() == {1, 9}


@pytest.mark.parametrize("name", ["neuclip", "openclip", "isogclr"])
def test_difficulty_is_the_exact_log_normalizer_or_the_stored_one(monkeypatch, name):
    monkeypatch.setattr(findings, "_ROWS", 7)
    embeddings = make_embeddings()
    loss = create_loss(name, embed_dim=WIDTH, num_samples=2 * ROWS).eval()
    anchors = torch.tensor([0, 3, 9, 20, 21, 22, 40, 59])
    if name == "isogclr":
        stored = torch.randn(2, 2 * ROWS, generator=torch.Generator().manual_seed(0))
        loss.normalizer.table.values[:, : 2 * ROWS] = stored
        expected = stored[:, embeddings.index[anchors]].mean(dim=0).double()
    else:
        tau = torch.full((2, len(anchors)), 0.1, dtype=torch.float64)
        exact = reference.exact_log_normalizers(embeddings.image, embeddings.text, anchors.tolist(), tau, 0.0)
        expected = exact.mean(dim=0)
    found, is_stored = log_normalizers(loss, embeddings, anchors, CPU)
    assert is_stored == (name == "isogclr")
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_a_steered_loss_predicts_temperatures_with_its_reference_model():
    embeddings, anchors = make_embeddings(), torch.tensor([0, 3, 9, 59])
    loss = create_loss("tempnet", embed_dim=WIDTH, num_samples=2 * ROWS, reference_dim=3).eval()
    sides = np.random.default_rng(0).normal(size=(2, 2 * ROWS, 3)).astype(np.float16)
    store = EmbeddingStore(Path(), *sides, about={})
    index = embeddings.index[anchors]
    rows, scale = (embeddings.image[anchors], embeddings.text[anchors]), torch.tensor(embeddings.logit_scale)
    tau = loss.anchor_temperatures(*rows, scale, index, store.rows(index))
    exact = reference.exact_log_normalizers(embeddings.image, embeddings.text, anchors.tolist(), tau.double(), 0.0)
    found, is_stored = log_normalizers(loss, embeddings, anchors, CPU, store)
    assert not is_stored
    torch.testing.assert_close(found, exact.mean(dim=0), rtol=1e-5, atol=1e-5)


def test_similarities_of_a_model_in_half_precision_are_cosines():
    sides = torch.stack([make_embeddings().image, make_embeddings().text]).bfloat16()
    output = {"image_features": sides[0], "text_features": sides[1], "logit_scale": torch.tensor(10.0)}
    batch = {"image": torch.zeros(ROWS), "text": torch.zeros(ROWS), "index": torch.arange(ROWS)}

    class Constant(torch.nn.Module):
        def forward(self, image, text):
            return output

    found = Encoder(Constant(), None, None, CPU).embed([batch], ROWS)
    torch.testing.assert_close(
        torch.stack([found.image, found.text]), torch.nn.functional.normalize(sides.float(), dim=2)
    )
    assert (sides.float().norm(dim=2) - 1).abs().max() > 1e-3


# --- the command, on a run --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trained(shards, tmp_path_factory):
    logs = tmp_path_factory.mktemp("logs")
    assert run(command(shards, logs, "run", "fastclip")) == 0
    return logs / "run"


@pytest.fixture(scope="module")
def inspected(trained):
    """Inspect a run; return the output folder. The manifest ``fewer.json`` excludes the twelve hardest samples."""
    leave_out = ["--leave-out", "hardest", "--extremes", "12", "--write-manifest", str(trained / "fewer.json")]
    loose = ["--duplicate-image", "0.5", "--duplicate-caption", "0.5", "--show", "4", "--max-pairs", "50"]
    inspect.main([str(trained), *loose, *leave_out])
    return trained / "inspect" / "epoch_2"


def test_the_program_lists_what_it_finds_with_shard_and_key(inspected, trained, shards):
    content = json.loads((inspected / "found.json").read_text())
    assert content["categories"].keys() == DEFINITIONS.keys()
    assert (content["samples"], content["loss"], content["checkpoint"]) == (NUM_SAMPLES, "fastclip", "epoch_2.pt")
    assert content["log-normalizers"] == "stored by the loss"
    assert content["thresholds"]["extremes"] == content["categories"]["hardest"]["count"] == 12
    names = []
    for path in sorted(Path(shards).parent.glob("*.tar")):
        with tarfile.open(path) as archive:
            names += [
                (path.name, member.name.partition(".")[0], archive.extractfile(member).read().decode())
                for member in archive
                if member.name.endswith(".txt")
            ]
    assert len(names) == NUM_SAMPLES
    assert all(tuple(place) == names[int(index)] for index, place in content["listed"].items())
    rows = list(csv.DictReader((inspected / "found.csv").open(newline="")))
    assert len(rows) == sum(len(category["found"]) for category in content["categories"].values())
    pair = next(row for row in rows if row["category"] == "duplicate-captions")
    for prefix in ("", "other_"):
        columns = [pair[prefix + column] for column in ("shard", "key", "caption")]
        assert tuple(columns) == names[int(pair[f"{prefix}index"])]

    page = (inspected / "index.html").read_text()
    for name, category in content["categories"].items():
        section = page[page.index(f'id="{name}"') :].partition("</details>")[0]
        assert section.count('class="card"') == min(4, len(category["found"]))


def test_copies_are_a_list_of_their_own_and_the_least_certain_pairs_are_shown(shards, tmp_path, caplog):
    """Six samples are stored twice. With loose thresholds, many other pairs count as duplicates."""
    with tarfile.open(tmp_path / "0.tar", "w") as copied:
        for path in sorted(Path(shards).parent.glob("*.tar")):
            with tarfile.open(path) as archive:
                for member in archive:
                    copied.addfile(member, archive.extractfile(member))
        with tarfile.open(sorted(Path(shards).parent.glob("*.tar"))[0]) as archive:
            for member in archive.getmembers()[: 6 * 3]:
                member.name, content = f"copy{member.name}", archive.extractfile(member).read()
                copied.addfile(member, io.BytesIO(content))
    assert run(command(str(tmp_path / "0.tar"), tmp_path, "run", "fastclip")) == 0
    loose = ["--duplicate-image", "0.3", "--duplicate-caption", "0.3", "--show", "4"]
    written = ["--leave-out", "copies,duplicates", "--write-manifest", str(tmp_path / "fewer.json")]
    inspect.main([str(tmp_path / "run"), *loose, *written])
    folder = tmp_path / "run" / "inspect" / "epoch_2"
    found = {name: of["found"] for name, of in json.loads((folder / "found.json").read_text())["categories"].items()}
    copies = [[first, second] for first, second, _ in sorted(found["copies"])]
    assert copies == [[index, NUM_SAMPLES + index] for index in range(6)]
    near = [pair for name in ("duplicates", "duplicate-images") for *pair, _ in found[name]]
    assert len(near) > 10 and not [pair for pair in near if pair in copies]
    page = (folder / "index.html").read_text()
    section = page[page.index('id="duplicates"') :].partition("</details>")[0]
    values = [f"{value:.3f}" for *_, value in found["duplicates"]]
    assert re.findall(r"cosine similarity (-?[0-9.]+)", section) == values[:2] + values[-2:]
    assert "--leave-out excludes" in caplog.text


def test_a_table_is_inspected_by_its_columns_with_a_model_that_has_weights(trained, tmp_path):
    export.main([str(trained), "--output", str(tmp_path / "model")])
    table = write_csv(tmp_path, rows=6, columns=("place", "words"))
    columns = ["--csv-img-key", "place", "--csv-caption-key", "words"]
    model = ["--model", f"local-dir:{tmp_path / 'model'}", "--output", str(tmp_path / "out")]
    inspect.main([str(table), *columns, *model])
    with open(tmp_path / "out" / "found.csv", newline="") as file:
        assert {line["caption"] for line in csv.DictReader(file)} <= {f"sample {row}" for row in range(6)}


def test_a_public_model_is_inspected_before_any_training(trained, shards, tmp_path):
    """The weights of a run, taken as a public model, find the same pairs as the run."""
    flags = ["--duplicate-image", "0.9", "--duplicate-caption", "0.9"]
    inspect.main([str(trained), *flags, "--output", str(tmp_path / "run")])
    weights = trained / "checkpoints" / "epoch_2.pt"
    copied = str(shutil.copy(weights, tmp_path / "weights.pt"))
    public = [shards, "--model", "demo-vit", "--pretrained", copied, *flags]
    with pytest.raises(UsageError, match="--output"):
        inspect.main(public)
    written = ["--leave-out", "duplicates", "--write-manifest", str(tmp_path / "fewer.json")]
    for _ in range(2):  # the second call reuses the embeddings
        inspect.main([*public, "--output", str(tmp_path / "public"), *written])
    expected, found = (json.loads((tmp_path / name / "found.json").read_text()) for name in ("run", "public"))
    for name in (*PAIRS, "misfit-captions", "misfit-images"):
        assert found["categories"][name]["count"] == expected["categories"][name]["count"], name
    left_out = Manifest.load(tmp_path / "fewer.json").left_out
    assert {*left_out.tolist()} == {*left_out.tolist()} & {
        pair[1] for pair in found["categories"]["duplicates"]["found"]
    }
    assert len(left_out) or not found["categories"]["duplicates"]["count"]


def test_embeddings_are_kept_for_the_next_look(inspected, trained, tmp_path, monkeypatch):
    def refuse_to_embed(*_):
        raise AssertionError("embedded again")

    monkeypatch.setattr(Encoder, "embed", refuse_to_embed)
    embeddings = embed_training_set(load_run(trained, "epoch_2.pt"), inspected)
    assert embeddings.index.tolist() == list(range(NUM_SAMPLES))
    torch.testing.assert_close(embeddings.image.norm(dim=1), torch.ones(NUM_SAMPLES))
    shutil.copytree(inspected, tmp_path, dirs_exist_ok=True)
    (tmp_path / "text").unlink()
    for epoch, folder in (("epoch_1.pt", inspected), ("epoch_2.pt", tmp_path)):  # another checkpoint, a missing table
        with pytest.raises(AssertionError, match="embedded again"):
            embed_training_set(load_run(trained, epoch), folder)


def test_a_full_disk_is_an_os_error_and_leaves_no_description(trained, tmp_path, monkeypatch):
    """Without allocated files, the process would die of a bus error. An empty description would fail every later call."""
    table, *_ = tables(tmp_path, 1000, 64)
    assert (tmp_path / "image").stat().st_blocks * 512 >= table.nbytes == 4 * 64 * 1000

    def no_space(*_):
        raise OSError("No space left on device")

    monkeypatch.setattr(os, "fsync", no_space)
    with pytest.raises(OSError, match="No space left"):
        embed_training_set(load_run(trained, "epoch_2.pt"), tmp_path / "full")
    assert not (tmp_path / "full" / "embeddings.json").exists()


def averages(folder: Path, epoch: int) -> np.ndarray:
    """Return the moving averages ``(n, 2)`` that a run stored at the end of an epoch."""
    (table,) = folder.glob(f"checkpoints/epoch_{epoch}.state/*/rank_*.normalizer.table.npy")
    return np.load(table)


def test_a_run_goes_on_with_the_manifest(inspected, trained, shards, tmp_path, caplog):
    """The resumed run trains only on the kept samples, and their indices do not change."""
    manifest = Manifest.load(trained / "fewer.json")
    categories = json.loads((inspected / "found.json").read_text())["categories"]
    hardest = [index for index, _ in categories["hardest"]["found"]]
    assert manifest.left_out.tolist() == sorted(hardest)
    assert manifest.num_samples == NUM_SAMPLES
    folder = shutil.copytree(trained, tmp_path / "run")
    (folder / "checkpoints" / "epoch_2.pt").unlink()
    shutil.rmtree(folder / "checkpoints" / "epoch_2.state")
    more = ["--manifest", str(trained / "fewer.json"), "--resume", "latest"]
    with caplog.at_level("INFO"):
        assert run(command(shards, tmp_path, "run", "fastclip", *more)) == 0
    assert "84 samples, 4 steps of 16 per epoch" in caplog.text  # before: 5 steps
    changed = (averages(folder, 1) != averages(folder, 2)).any(axis=1)
    assert not changed[hardest].any() and changed.sum() == 64
    # The last step is the eighth of the new schedule (2 times 4 steps), although it is the run's ninth step.
    last = json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])
    assert last["step"] == 8 and last["lr"] == pytest.approx(0.5e-3 * (1 + math.cos(math.pi * (7 - 3) / (8 - 3))))

    inspect.main([str(folder), "--anchors", "30", "--output", str(tmp_path / "again")])
    content = json.loads((tmp_path / "again" / "found.json").read_text())
    assert (content["listed"].keys() & set(map(str, hardest))) == set()
    assert content["left out by the manifest"] == 12
    assert content["looked at"].startswith("30 drawn at random, each compared with all 72")


def test_embeddings_of_another_program_stay_as_they_are(trained, shards, tmp_path):
    weights = str(trained / "checkpoints" / "epoch_2.pt")
    write_reference([shards, "--model", "demo-vit", "--pretrained", weights, "--output", str(tmp_path)])
    before = contents(tmp_path)
    with pytest.raises(UsageError, match="--output"):
        inspect.main([str(trained), "--output", str(tmp_path)])
    assert contents(tmp_path) == before


def test_wrong_arguments_are_refused(trained, shards, tmp_path, capsys):
    own = str(Path(shards).parent / "manifest.json")
    for words, expected in (
        (["--leave-out", "duplicates"], "give both flags, or remove both"),
        (["--leave-out", "misfits", "--write-manifest", own], "choose another name"),
    ):
        with pytest.raises(UsageError, match=expected):
            inspect.main([str(trained), *words])
    with pytest.raises(UsageError, match="--pretrained"):
        inspect.main([shards])
    with pytest.raises(UsageError, match="--csv"):
        inspect.main([str(trained), "--csv-img-key", "path"])
    with pytest.raises(SystemExit):
        inspect.main([str(trained), "--leave-out", "dups"])
    assert "--leave-out: " in (error := capsys.readouterr().err) and "expected one or more of" in error
    with file_lock(tmp_path / "both"), pytest.raises(ValueError, match=r"another process writes into .*both"):
        inspect.main([str(trained), "--output", str(tmp_path / "both")])
