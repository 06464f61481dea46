"""The runner of the icon experiments: its queue, its temperature, and that a run is a function of its description."""

import io
import json
import tarfile
from pathlib import Path

import numpy as np
import open_clip
import pytest
import torch
from PIL import Image

from openclip_ext.model_configs import add_model_configs
from scripts.experiments import run_grid
from scripts.experiments.grid_tables import format_tables
from scripts.experiments.pairs import RECIPE
from scripts.experiments.run_grid import Pairs, Run, plan, read_results

SETTING = {"loss": "openclip"}
OTHER = {"loss": "openclip", "temperature": 0.03}
GRID = {
    "model": "demo-resnet",
    "schedules": {"short": {"batch_size": 4, "epochs": 1, "lr": 1e-3}},
    "lr_factors": [0.5, 2.0],
    "seeds": [0, 1, 2],
    "families": {"one": [SETTING, OTHER]},
}


def finished(runs: list[Run], **val: float) -> dict[str, dict]:
    """Results of runs, all equally good but where a setting or a rate is named better."""
    scores = {run.id: val.get("other", 0.1) if run.setting == OTHER else val.get(f"lr{run.lr:g}", 0.1) for run in runs}
    return {run.id: {"val": {"mean": scores[run.id]}, "test": {"mean": 1 - scores[run.id]}} for run in runs}


def test_the_stages_follow_one_another():
    results: dict[str, dict] = {}
    first = plan(GRID, "data", results)
    assert [(run.setting, run.lr, run.seed) for run in first] == [(SETTING, 1e-3, 0), (OTHER, 1e-3, 0)]
    results |= finished(first[:1])
    assert plan(GRID, "data", results) == first[1:]  # nothing is decided before all are finished
    results |= finished(first[1:], other=0.2)
    second = plan(GRID, "data", results)
    assert [(run.setting, run.lr, run.seed) for run in second] == [(OTHER, 5e-4, 0), (OTHER, 2e-3, 0)]
    results |= {second[0].id: {"val": {"mean": 0.15}}, second[1].id: {"val": {"mean": 0.3}}}
    third = plan(GRID, "data", results)
    assert [(run.setting, run.lr, run.seed) for run in third] == [(OTHER, 2e-3, 1), (OTHER, 2e-3, 2)]
    assert plan(GRID, "data", results | finished(third)) == []


def test_a_schedule_is_finished_before_the_next_begins():
    grid = GRID | {"schedules": {"a": GRID["schedules"]["short"], "b": {"batch_size": 8, "epochs": 1, "lr": 1e-3}}}
    results = finished([run for run in plan(grid, "data", {}) if run.schedule == "a"])
    assert [run.schedule for run in plan(grid, "data", results)] == ["a", "a", "b", "b"]


def test_the_families_take_turns():
    grid = GRID | {"families": {"one": [SETTING, OTHER], "two": [SETTING | {"lr_tau": 1e-3}, OTHER | {"lr_tau": 1e-3}]}}
    assert [run.family for run in plan(grid, "data", {})] == ["one", "two", "one", "two"]


def test_tuning_must_be_equal():
    with pytest.raises(ValueError, match="equally many settings"):
        plan(GRID | {"families": {"one": [SETTING, OTHER], "two": [SETTING]}}, "data", {})


def test_a_run_is_named_by_what_it_does():
    run = plan(GRID, "data", {})[0]
    renamed = Run(**{**vars(run), "family": "other", "schedule": "other"})
    assert renamed.id == run.id
    assert len({run.id, Run(**{**vars(run), "seed": 1}).id, Run(**{**vars(run), "data": "more"}).id}) == 3


def test_a_line_that_was_cut_off_is_no_result(tmp_path: Path):
    path = tmp_path / "runs.jsonl"
    assert read_results(path) == {}
    path.write_text('{"id": "a", "x": 1}\n{"id": "b", "x"')
    assert read_results(path) == {"a": {"id": "a", "x": 1}}
    path.write_text('{"id": "a"\n{"id": "b"}\n')
    with pytest.raises(json.JSONDecodeError):
        read_results(path)


def divergence(similarities: torch.Tensor, tau: float) -> float:
    p = (similarities / tau).softmax(dim=-1)
    return (p * (p * p.shape[-1]).log()).sum(dim=-1).mean().item()


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three splits as ``scripts.experiments.icons`` writes them, of random pixels."""
    folder = tmp_path_factory.mktemp("icons")
    names = ["arrow left", "bell", "home"]
    (folder / "names.txt").write_text("".join(f"{name}\n" for name in names))
    (folder / RECIPE).write_text("{}")
    random = np.random.default_rng(0)
    for split, number in {"train": 12, "val": 6, "test": 6}.items():
        (folder / split).mkdir()
        with tarfile.open(folder / split / "00000.tar", "w") as tar:
            for index in range(number):
                buffer = io.BytesIO()
                Image.fromarray(random.integers(0, 256, (64, 64, 3), dtype=np.uint8)).save(buffer, "PNG")
                name = names[index % 3]
                content = {"png": buffer.getvalue(), "txt": f"{name} outline".encode()}
                for extension, member in (content | {"json": json.dumps({"name": name}).encode()}).items():
                    info = tarfile.TarInfo(f"{index:08d}.{extension}")
                    info.size = len(member)
                    tar.addfile(info, io.BytesIO(member))
    return folder


@pytest.fixture(scope="module")
def pairs(data: Path) -> Pairs:
    add_model_configs()
    return Pairs(data, "demo-resnet")


@pytest.mark.parametrize("name", ["demo-resnet", "demo-vit"])  # an image size that is a number, and one that is a pair
def test_images_are_halved_and_shifted(pairs: Pairs, name: str):
    model = open_clip.create_model(name)
    stored = pairs.splits["train"].images[:2].float()
    mean, std = (torch.tensor(value).view(3, 1, 1) for value in (model.visual.image_mean, model.visual.image_std))

    def pixels(shifts: torch.Tensor | None) -> torch.Tensor:
        return (pairs.images("train", torch.arange(2), model, shifts) * std + mean) * 255

    halved = stored.view(2, 3, 32, 2, 32, 2).mean(dim=(3, 5))
    torch.testing.assert_close(pixels(None), halved)
    torch.testing.assert_close(pixels(torch.zeros(2, 2, dtype=torch.int64)), halved)
    moved = pixels(torch.tensor([[2, 0], [0, -2]]))
    torch.testing.assert_close(moved[0, :, :-1], halved[0, :, 1:])  # two stored pixels down are one of the model's
    torch.testing.assert_close(moved[0, :, -1], torch.full((3, 32), 255.0))
    torch.testing.assert_close(moved[1, :, :, 1:], halved[1, :, :, :-1])


def test_perfect_features_score_one(pairs: Pairs):
    split = pairs.splits["val"]

    class Oracle(torch.nn.Module):
        """Embeds a text by its first word; an image, by its sample's class."""

        visual = open_clip.create_model("demo-resnet").visual

        def encode_text(self, texts: torch.Tensor, normalize: bool) -> torch.Tensor:
            first = [int((pairs.names[:, 1] == text[1]).nonzero()) for text in texts]
            return torch.eye(3)[first]

        def encode_image(self, images: torch.Tensor, normalize: bool) -> torch.Tensor:
            return torch.eye(3)[split.classes]

    scores = pairs.score(Oracle(), "val")
    assert scores == {"name": 1.0, "image-to-text": 1.0, "text-to-image": 1.0, "mean": 1.0}


def one_run(setting: dict, **changes: object) -> Run:
    return Run(**{**vars(plan(GRID, "data", {})[0]), "setting": setting, "epochs": 2, **changes})


@pytest.mark.parametrize(
    "setting",
    [
        {"loss": "openclip"},
        {"loss": "fastclip", "options": {"rho": 5.0}},
        {"loss": "queueclip", "options": {"prototypes": 8, "temperature_scheme": "solved", "rho": 1.0}},
    ],
)
def test_a_run_is_a_function_of_its_description(setting: dict, data: Path):
    first, again = (run_grid.train(one_run(setting), str(data)) for _ in range(2))
    for result in (first, again):
        del result["seconds"], result["cpu_seconds"]
    assert first == again
    other = run_grid.train(one_run(setting, seed=1), str(data))
    assert other["temperature"] != first["temperature"] or other["val"] != first["val"]


def test_a_temperature_with_rate_zero_is_constant(data: Path):
    result = run_grid.train(one_run({"loss": "openclip", "temperature": 0.05, "lr_tau": 0}), str(data))
    assert result["temperature"] == pytest.approx(0.05)


def test_losses_see_the_same_samples_from_the_same_start(data: Path, pairs: Pairs, monkeypatch: pytest.MonkeyPatch):
    seen: dict[str, list] = {"openclip": [], "neuclip": []}
    original = Pairs.images
    for loss, batches in seen.items():

        def recording(self, split, rows, model, shifts=None, batches=batches):
            batches.append((rows.tolist(), shifts.tolist()))
            return original(self, split, rows, model, shifts)

        monkeypatch.setattr(Pairs, "images", recording)
        trainer = run_grid._Trainer(one_run({"loss": loss}), pairs)
        batches.append(trainer.model.text_projection.sum().item())
        for epoch in range(2):
            trainer.epoch(epoch)
    assert seen["openclip"] == seen["neuclip"]
    assert len(seen["openclip"]) == 1 + 2 * 3


def test_finished_runs_are_skipped(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture):
    grid, results = tmp_path / "grid.json", tmp_path / "runs.jsonl"
    grid.write_text(json.dumps(GRID | {"lr_factors": [], "seeds": [0, 1], "families": {"one": [SETTING]}}))
    argv = [str(grid), "--data", str(data), "--results", str(results), "--workers", "1"]
    run_grid.main(argv)
    lines = results.read_text().splitlines()
    assert [json.loads(line)["seed"] for line in lines] == [0, 1]
    results.write_text(lines[0] + "\n" + lines[1][:40])  # killed while it wrote
    run_grid.main(argv)
    assert len(read_results(results)) == 2
    again = results.read_text()
    run_grid.main(argv)
    assert results.read_text() == again


def test_the_tables_say_what_is_chosen_and_what_is_not_finished():
    grid = GRID | {"families": {"base": [SETTING], "better": [OTHER], "late": [SETTING | {"lr_tau": 1e-3}]}}
    results: dict[str, dict] = {}
    for _ in range(3):
        for run in plan(grid, "data", results):
            if run.family != "late":
                mean = 0.1 + 0.01 * run.seed + (0.05 + 0.001 * run.seed if run.family == "better" else 0)
                scores = dict.fromkeys((*run_grid.METRICS, "mean"), mean)
                results[run.id] = {**vars(run), "val": scores, "test": scores, "temperature": 0.04, "cpu_seconds": 99.6}
    best, _, tuning = format_tables(grid, "data", results).partition("validation sets")
    # Paired differences 5.0, 5.1, 5.2 percent: 4.303 * 0.1 / sqrt(3) on either side.
    difference = "16.1, +5.1 (4.9 to 5.3)"
    assert (
        f"| better | temperature 0.03, lr 0.001 | {difference} | {difference} | 15.0 16.1 17.2 | 0.040 | 100 |" in best
    )
    assert "| base | defaults, lr 0.001 | 11.0 | 11.0 | 10.0 11.0 12.0 | 0.040 | 100 |" in best
    assert "| late | not tuned yet |" in best
    assert "| base | defaults | 0.0005 | 0.100 | 0.100 | 0.040 |" in tuning
    assert "late" not in tuning
