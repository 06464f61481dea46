"""Grid runs on the icons data: augmentation, scores, and equal results of runs with equal descriptions."""

import json
from dataclasses import replace
from pathlib import Path

import open_clip
import pytest
import torch

from openclip_ext.compare.data import StudyData
from openclip_ext.compare.trials import read_results
from openclip_ext.model_configs import add_model_configs
from scripts.experiments import grid as grids
from scripts.experiments.grid import averaged, contests, load_data, pending, shifted
from scripts.experiments.tables import format_tables
from tests.compare.colors import members, write_names
from tests.data.shards import write_tar

SETTING = {"loss": "openclip"}
OTHER = {"loss": "openclip", "temperature": 0.03}
GRID = {
    "model": "demo-resnet",
    "schedules": {"short": {"batch_size": 4, "epochs": 1, "lr": 1e-3}},
    "seeds": [0, 1, 2],
    "families": {"one": [SETTING, OTHER]},
}


def test_grids_that_mean_something_else_are_refused():
    for changes, message in (
        ({"families": {"one": [SETTING, OTHER], "two": [SETTING]}}, "equally many settings"),
        ({"seed": [0]}, "a grid cannot have seed: expected only estimation_error, families"),
    ):
        with pytest.raises(ValueError, match=message):
            contests(GRID | changes, "data")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_splits(tmp_path_factory.mktemp("icons"))


def write_splits(folder: Path) -> Path:
    """Write three splits in the format of ``scripts.experiments.icons``; return the folder."""
    folder.mkdir(exist_ok=True)
    write_names(folder)
    (folder / "recipe.json").write_text("{}")
    for split, count in {"train": 12, "val": 6, "test": 6}.items():
        write_tar(folder / split / "00000.tar", members(count, size=64))
    return folder


@pytest.fixture(scope="module")
def data(folder: Path) -> StudyData:
    add_model_configs()
    return load_data(folder, "demo-resnet")


@pytest.mark.parametrize("name", ["demo-resnet", "demo-vit"])  # their image sizes are a number and a pair
def test_images_are_halved_and_shifted(name: str):
    add_model_configs()
    visual = open_clip.create_model(name).visual
    stored = torch.randint(0, 256, (2, 3, 64, 64), dtype=torch.uint8)
    mean, std = (torch.tensor(value).view(3, 1, 1) for value in (visual.image_mean, visual.image_std))

    def pixels(shifts: list[list[int]]) -> torch.Tensor:
        return (averaged(shifted(stored, torch.tensor(shifts)), visual) * std + mean) * 255

    halved = stored.float().view(2, 3, 32, 2, 32, 2).mean(dim=(3, 5))
    torch.testing.assert_close(pixels([[0, 0], [0, 0]]), halved, rtol=1e-4, atol=1e-3)
    moved = pixels([[2, 0], [0, -2]])  # 2 stored pixels are 1 pixel of the halved image
    torch.testing.assert_close(moved[0, :, :-1], halved[0, :, 1:], rtol=1e-4, atol=1e-3)
    torch.testing.assert_close(moved[0, :, -1], torch.full((3, 32), 255.0))
    torch.testing.assert_close(moved[1, :, :, 1:], halved[1, :, :, :-1], rtol=1e-4, atol=1e-3)


def train(data: StudyData, setting: dict, seed: int = 0, measured: int = 0) -> dict:
    run = replace(pending(GRID, "data", {})[0], setting=setting, epochs=2, seed=seed)
    result = grids.train(data, run, torch.device("cpu"), lambda samples: None, measured)
    result["curve"] = [[samples, score] for samples, _, score in result["curve"]]
    return {name: value for name, value in result.items() if name not in ("seconds", "cpu_seconds")}


def test_runs_start_from_weights_and_train_adapters_at_their_own_rate(folder: Path, data: StudyData, tmp_path: Path):
    model = open_clip.create_model("demo-vit")
    weights = tmp_path / "model.pt"
    torch.save(model.state_dict(), weights)
    families = {"one": [{"loss": "openclip", "lora_rank": 2, "lr": 0.5}]}
    (run,) = contests(GRID | {"model": "demo-vit", "seeds": [0], "families": families}, "data")["short"].families["one"]
    assert run.lr == 0.5
    data = load_data(folder, "demo-vit")
    training = grids.GridRun(data, run, torch.device("cpu"), weights)
    *_, last = training.run_steps()
    assert last == 3
    before = model.state_dict()
    after = {name.replace(".base_layer", ""): value for name, value in training.model.state_dict().items()}
    moved = {name for name, value in before.items() if not torch.equal(value, after[name])}
    assert moved == {"logit_scale"}
    adapters = [name for name in after if ".lora_B." in name]
    assert adapters and any(after[name].any() for name in adapters)


@pytest.mark.parametrize(
    "setting",
    [
        {"loss": "openclip"},
        {"loss": "fastclip", "options": {"rho": 5.0}},
        {"loss": "queueclip", "options": {"prototypes": 8, "temperature_scheme": "solved", "rho": 1.0}},
        {"loss": "siglip"},
        {"loss": "openclip", "options": {"equal_captions": "mask"}, "captions": "name"},
    ],
)
def test_a_run_is_a_function_of_its_description(setting: dict, data: StudyData):
    first, again = (train(data, setting) for _ in range(2))
    assert first == again
    assert first["curve"][-1] == [24, first["val"]["mean"]]
    other = train(data, setting, seed=1)
    assert other["temperature"] != first["temperature"] or other["val"] != first["val"]


@pytest.mark.parametrize("loss", ["openclip", "queueclip"])
def test_the_estimation_error_is_measured_after_each_epoch_and_changes_nothing(loss: str, data: StudyData):
    plain, measured = (train(data, {"loss": loss}, measured=samples) for samples in (0, 8))
    assert plain["test"] == measured["test"] and [point[0] for point in measured["curve"]] == [12, 24]
    for error in measured["estimation_errors"]:
        assert error["minibatch"] > 0 and (error["estimator"] is None) == (loss == "openclip")


def test_finished_runs_are_skipped(folder: Path, tmp_path: Path):
    grid, results = tmp_path / "grid.json", tmp_path / "runs.jsonl"
    grid.write_text(json.dumps(GRID | {"seeds": [0, 1], "families": {"one": [SETTING]}}))
    argv = [str(grid), "--data", str(folder), "--results", str(results), "--workers", "1"]
    grids.main(argv)
    lines = results.read_text().splitlines()
    assert [json.loads(line)["seed"] for line in lines] == [0, 1]
    results.write_text(lines[0] + "\n" + lines[1][:40])  # the program was killed during a write
    grids.main(argv)
    assert results.read_text().startswith(lines[0] + "\n") and len(read_results(results)) == 2


def test_the_tables_say_what_is_chosen_and_what_is_not_finished():
    grid = GRID | {"families": {"base": [SETTING], "better": [OTHER], "late": [SETTING | {"lr_tau": 1e-3}]}}
    results: dict[str, dict] = {}
    for _ in range(3):
        for run in pending(grid, "data", results):
            if run.family != "late":
                mean = 0.1 + 0.01 * run.seed + (0.05 + 0.001 * run.seed if run.family == "better" else 0)
                scores = dict.fromkeys((*grids.METRICS, "mean"), mean)
                results[run.id] = {**vars(run), "val": scores, "test": scores, "temperature": 0.04, "cpu_seconds": 99.6}
    best, _, tuning = format_tables(grid, "data", results).partition("validation sets")
    # The paired differences are 5.0, 5.1 and 5.2 points: mean 5.1, standard deviation 0.1, interval ± 4.303 * 0.1 / sqrt(3).
    difference = "16.1, +5.1 (4.9 to 5.3)"
    assert (
        f"| better | temperature 0.03, lr 0.001 | {difference} | {difference} | 15.0 16.1 17.2 | 0.040 | 100 |" in best
    )
    assert "| base | defaults, lr 0.001 | 11.0 | 11.0 | 10.0 11.0 12.0 | 0.040 | 100 |" in best
    assert "| late | not tuned yet |" in best
    assert "| base | defaults | 0.001 | 0.100 | 0.100 | 0.040 |" in tuning and "late" not in tuning
