"""Fine-tuning: rehearsal, scores before and after, the chosen mix of weights, own classes, and ``--config finetune``."""

import csv
import json
import resource
import shlex
import shutil
import tarfile
from pathlib import Path
from typing import Any

import open_clip
import pytest
import torch
from PIL import Image

from openclip_ext.cli.errors import UsageError
from openclip_ext.data.shapes.write import ShapesConfig, write_shards
from openclip_ext.diagnostics.finished_run import load_run
from openclip_ext.evaluation import datacomp
from openclip_ext.evaluation.run_folder import read_config
from openclip_ext.evaluation.training_log import read_log
from openclip_ext.export import __main__ as export
from openclip_ext.training.flags import parse
from openclip_ext.training.interpolation import ALPHAS, choose
from openclip_ext.training.main import main
from openclip_ext.training.plan import resolve
from openclip_ext.training.trainer import SaveFailed
from tests.data.test_reference import write_store
from tests.evaluation.datasets import write_class_folders
from tests.training import runs
from tests.training.commands import plan_of
from tests.training.runs import SMALL_MODEL, evaluation, results_of, run, small_command, stock_model

R_AT_1 = ("image_to_text_R@1", "text_to_image_R@1")
NUM_KEEP = 210


@pytest.fixture(scope="module")
def start(tmp_path_factory) -> Path:
    """Return weights to fine-tune, trained for two epochs, so that their scores are above chance."""
    folder = tmp_path_factory.mktemp("start")
    return runs.train(runs.make_shards(folder / "shards"), folder, "run", "openclip") / "checkpoints" / "epoch_2.pt"


@pytest.fixture(scope="module")
def keep(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("keep")
    write_shards(folder, ShapesConfig(NUM_KEEP, 5, "train", NUM_KEEP), workers=1)
    return str(folder / "*.tar")


@pytest.fixture(scope="module")
def flags(start, keep, shards) -> list[str]:
    return ["--pretrained", str(start), "--keep-data", keep, "--val-data", shards, "--lr", "3e-3"]


@pytest.fixture(scope="module")
def whole(flags, shards, tmp_path_factory) -> Path:
    return runs.train(shards, tmp_path_factory.mktemp("whole"), "run", "queueclip", *flags)


def weights_of(path: Path) -> dict[str, torch.Tensor]:
    return torch.load(path, weights_only=True)["state_dict"]


def scores_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "interpolation.json").read_text())


def test_the_start_is_scored_at_step_0_and_the_mixes_have_the_scores_of_evaluations(whole, start, shards, tmp_path):
    epochs = results_of(whole)
    assert [line["epoch"] for line in epochs] == [0, 1, 2]
    log = read_log(whole)
    assert [one.samples for one in log.validations] == [0, 7 * 16, 14 * 16] and not log.unfinished
    scores = scores_of(whole)["scores"]
    for prefix, name, samples in (("", "validation", runs.NUM_SAMPLES), ("kept_", "kept", 100)):
        assert scores[name].keys() == {f"{weight:g}" for weight in ALPHAS}
        for weight, line in (("0", epochs[0]), ("1", epochs[-1])):
            assert scores[name][weight]["value"] == pytest.approx(sum(line[prefix + key] for key in R_AT_1) / 2)
            assert scores[name][weight]["samples"] == samples and scores[name][weight]["half"] > 0
    model = whole / "checkpoints" / "interpolated.pt"
    assert (
        run(evaluation(tmp_path, "own", "--model", SMALL_MODEL, "--pretrained", str(model), "--val-data", shards)) == 0
    )
    (line,) = results_of(tmp_path / "own")
    chosen = scores["validation"][f"{scores_of(whole)['chosen']:g}"]["value"]
    assert chosen == pytest.approx(sum(line[key] for key in R_AT_1) / 2)


def test_the_chosen_model_is_the_exact_mix_and_loads_in_stock_openclip(whole, start):
    model, chosen = whole / "checkpoints" / "interpolated.pt", scores_of(whole)["chosen"]
    first, last, mix = (weights_of(path) for path in (start, whole / "checkpoints" / "epoch_2.pt", model))
    assert mix.keys() == last.keys() and chosen > 0
    for name, value in mix.items():
        expected = torch.lerp(first[name], last[name], chosen) if value.is_floating_point() else last[name]
        assert torch.equal(value, expected), name
    stock_model(model, SMALL_MODEL)


def test_the_mix_of_an_earlier_epoch_is_not_named(whole, flags, shards, tmp_path, capsys):
    shutil.copytree(whole, tmp_path / "run")
    longer = ["--resume", "latest", "--epochs", "3", "--no-before-after"]
    assert run(small_command(shards, tmp_path, "run", "queueclip", *flags, *longer)) == 0
    for folder, is_named in ((whole, True), (tmp_path / "run", False)):
        export.main([str(folder), "--output", str(tmp_path / f"exported-{is_named}")])
        assert ("interpolated.pt" in capsys.readouterr().out) == is_named
        with pytest.raises(UsageError, match=r"Give --pretrained .*epoch_\d\.pt") as error:
            run(small_command(shards, tmp_path, "next", "openclip", "--pretrained", str(folder)))
        assert ("interpolated.pt" in str(error.value)) == is_named


def test_a_finished_run_chooses_again_for_another_share_to_keep(whole, flags, shards, tmp_path):
    shutil.copytree(whole, tmp_path / "run")
    command = small_command(shards, tmp_path, "run", "queueclip", *flags, "--resume", "latest")
    before, chosen = scores_of(whole), {}
    for share in ("0", "1"):
        assert run([*command, "--keep-at-least", share]) == 0
        found = scores_of(tmp_path / "run")
        own, kept = (
            {float(key): value["value"] for key, value in found["scores"][name].items()} for name in found["scores"]
        )
        assert found["scores"] == before["scores"]
        assert found["chosen"] == choose(own, kept, float(share)).weight
        model = torch.load(tmp_path / "run" / "checkpoints" / "interpolated.pt", weights_only=True)
        chosen[share] = model["interpolate"]
    assert chosen["0"] != chosen["1"]


def test_a_mix_that_cannot_be_saved_ends_the_run_after_its_scores(whole, flags, shards, tmp_path, caplog):
    shutil.copytree(whole, tmp_path / "run")
    command = small_command(
        shards, tmp_path, "run", "queueclip", *flags, "--resume", "latest", "--keep-at-least", "0.5"
    )
    caplog.set_level("INFO")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    try:
        with pytest.raises(SaveFailed, match="too large"):
            run(command)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert "own pairs, R@1" in caplog.text
    assert scores_of(tmp_path / "run") == scores_of(whole)
    assert run(command) == 0
    assert scores_of(tmp_path / "run")["keep_at_least"] == 0.5


def test_evaluate_gives_the_curve_of_the_mixes_and_names_the_chosen_one(whole, shards, tmp_path, capsys, caplog):
    arguments = ["--val-data", shards, "--device", "cpu", "--output-dir", str(tmp_path)]
    assert datacomp.main([str(whole), *arguments, "--interpolate", "0,0.5,1"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines() if line.startswith(("0 ", "0.5 ", "1 "))]
    scores = scores_of(whole)["scores"]["validation"]
    expected = {weight: pytest.approx(scores[weight]["value"], abs=6e-5) for weight in ("0", "0.5", "1")}
    assert {line[0]: float(line[1]) for line in lines} == expected
    moved = shutil.copytree(whole, tmp_path / "a run")
    chosen = str(moved / "checkpoints" / "interpolated.pt")
    assert datacomp.main([str(moved), *arguments]) == 0
    assert f"openclip-ext evaluate {shlex.quote(chosen)}" in capsys.readouterr().out
    export.main([str(moved), "--output", str(tmp_path / "exported")])
    assert f"openclip-ext export {shlex.quote(chosen)}" in capsys.readouterr().out
    assert datacomp.main([chosen, *arguments, "--interpolate", "0.5"]) == 2
    assert "--interpolate" in caplog.text


def test_the_curve_has_the_accuracy_of_each_mix(whole, tmp_path, capsys):
    write_class_folders(tmp_path / "photos", 60, lambda digit: f"digit {digit % 10}")
    found = {}
    for weights in ("0,1", "1"):
        arguments = ["--device", "cpu", "--tasks", str(tmp_path / "photos"), "--interpolate", weights]
        assert datacomp.main([str(whole), *arguments, "--output-dir", str(tmp_path / weights)]) == 0
        lines = capsys.readouterr().out.splitlines()
        found[weights] = dict(line.split(maxsplit=1) for line in lines if line.startswith(("0 ", "1 ")))
    assert found["0,1"]["1"] == found["1"]["1"] != found["0,1"]["0"]


def test_the_mixes_name_a_broken_image_once(start, shards, tmp_path, caplog):
    rows = [("filepath", "title")]
    for number, color in enumerate(("red", "green", "blue", "yellow", "black", "white")):
        Image.new("RGB", (32, 32), color).save(tmp_path / f"{number}.png")
        rows.append((str(tmp_path / f"{number}.png"), color))
    (tmp_path / "3.png").write_bytes(b"broken")
    with open(tmp_path / "val.csv", "w", newline="") as file:
        csv.writer(file).writerows(rows)
    (tmp_path / "classes.csv").write_text((tmp_path / "val.csv").read_text().replace("title", "label"))
    val = ["--val-data", str(tmp_path / "val.csv"), "--val-frequency", "2", "--workers", "0"]
    val += ["--val-classes", str(tmp_path / "classes.csv")]
    folder = runs.train(shards, tmp_path, "run", "openclip", "--pretrained", str(start), *val)
    assert all(len(scores) == len(ALPHAS) for scores in scores_of(folder)["scores"].values())
    # By the first score, the score of the last epoch, and the first mix.
    for of_classes in (False, True):
        named = [message for message in caplog.messages if "3.png" in message]
        assert sum(("--val-classes" in message) == of_classes for message in named) == 3


def test_initial_weights_that_are_not_found_are_explained(start, whole, shards, tmp_path, caplog):
    moved = shutil.copytree(whole, tmp_path / "run")
    path = moved / "config.json"
    path.write_text(path.read_text().replace(str(start), "start.pt"))  # relative to another folder
    assert datacomp.main([str(moved), "--val-data", shards, "--device", "cpu", "--interpolate", "0.5"]) == 2
    assert "--interpolate" in caplog.text and "start.pt" in caplog.text and "relative" in caplog.text


def test_initial_weights_that_have_changed_are_not_mixed(start, shards, tmp_path, caplog):
    """In a resumed run, and in an evaluation of the run."""
    weights = Path(shutil.copy(start, tmp_path / "start.pt"))
    more = ["--pretrained", str(weights), "--val-data", shards, "--resume", "latest"]
    command = small_command(shards, tmp_path, "run", "openclip", *more)
    assert run(command, stop_after=3) == runs.EXIT_AFTER_SIGTERM
    content = torch.load(weights, weights_only=True)
    torch.save({"state_dict": {name: 2 * value for name, value in content["state_dict"].items()}}, weights)
    assert run(command) == 0
    assert not (tmp_path / "run" / "checkpoints" / "interpolated.pt").exists()
    evaluated = [str(tmp_path / "run"), "--val-data", shards, "--device", "cpu", "--workers", "0"]
    assert datacomp.main([*evaluated, "--interpolate", "0.5"]) == 2
    assert caplog.text.count(f"{weights} has changed") == 2


@pytest.mark.parametrize("more", [["--batch-size", "8"], ["--keep-share", "0.5"]])
def test_a_run_with_general_pairs_keeps_its_batch(more, whole, flags, shards, tmp_path):
    shutil.copytree(whole, tmp_path / "run")
    command = small_command(shards, tmp_path, "run", "queueclip", *flags, "--resume", "latest", "--epochs", "3", *more)
    with pytest.raises(ValueError, match="--keep-share"):
        main(command)


def test_a_stopped_run_is_the_same(flags, shards, tmp_path):
    more = [*flags, "--accum-freq", "2", "--model-ema-decay", "0.5", "--val-data", shards.replace("6}", "1}")]
    expected = runs.train(shards, tmp_path, "whole", "openclip", *more)
    found = runs.train(shards, tmp_path, "stopped", "openclip", *more, stops=[2, 3])
    runs.assert_same_run(found, expected)
    assert results_of(found) == results_of(expected) and scores_of(found) == scores_of(expected)
    # A run that was killed before the choice makes it up for.
    (found / "interpolation.json").unlink()
    assert run(small_command(shards, tmp_path, "stopped", "openclip", *more, "--resume", "latest")) == 0
    assert scores_of(found) == scores_of(expected) and results_of(found) == results_of(expected)


@pytest.mark.parametrize("more", [[], ["--fsdp", "--precision", "fp32"]])
def test_two_ranks(more, flags, start, shards, tmp_path):
    if more:
        folder = runs.train_on_two_ranks(shards, tmp_path, "queueclip", *flags, *more)
    else:
        folder = tmp_path / "run"
        runs.run_on_two_ranks(small_command(shards, tmp_path, "run", "queueclip", "--batch-size", "8", *flags))
    assert [line["epoch"] for line in results_of(folder)] == [0, 1, 2]
    first, last, mix = (
        weights_of(path)
        for path in (start, folder / "checkpoints" / "epoch_2.pt", folder / "checkpoints" / "interpolated.pt")
    )
    name, chosen = "visual.conv1.weight", scores_of(folder)["chosen"]
    trained = last.get(name, last.get(f"module.{name}"))
    assert torch.equal(mix[name], torch.lerp(first[name], trained, chosen))


def test_adapters_are_mixed_by_their_scale(flags, start, shards, tmp_path):
    pytest.importorskip("peft", reason="peft is not installed: pip install 'openclip_ext[lora]'")
    folder = runs.train(shards, tmp_path, "run", "openclip", *flags, "--lora-rank", "4", "--lr", "1e-2")
    chosen, first, mix = (
        scores_of(folder)["chosen"],
        weights_of(start),
        weights_of(folder / "checkpoints/interpolated.pt"),
    )
    content = torch.load(folder / "checkpoints" / "epoch_2.pt", weights_only=True)
    adapted, name = content["unmerged"]["state_dict"], "transformer.resblocks.0.mlp.c_fc"
    change = adapted[f"{name}.lora_B.default.weight"] @ adapted[f"{name}.lora_A.default.weight"]
    expected = first[f"{name}.weight"] + chosen * 2 * change  # --lora-alpha is twice the rank
    torch.testing.assert_close(mix[f"{name}.weight"], expected, atol=1e-6, rtol=0)
    assert change.abs().max() > 1e-3


def test_the_comparison_can_be_omitted_and_does_not_change_the_training(flags, shards, whole, tmp_path):
    folder = runs.train(shards, tmp_path, "run", "queueclip", *flags, "--no-before-after")
    assert runs.losses_of(folder) == runs.losses_of(whole)
    found, expected = (weights_of(run / "checkpoints" / "epoch_2.pt") for run in (folder, whole))
    assert runs.differences(found, expected) == []
    assert [line["epoch"] for line in results_of(folder)] == [1, 2]
    assert not (folder / "interpolation.json").exists()


def test_general_pairs_need_no_embeddings_of_a_reference_model(keep, shards, tmp_path):
    store = write_store(tmp_path / "store", shards)
    more = ("--reference", str(store), "--no-steer", "--distill", "0.5", "--keep-data", keep)
    steps = [
        line for line in runs.metrics_of(runs.train(shards, tmp_path, "run", "queueclip", *more)) if "loss" in line
    ]
    assert len(steps) == 14 and all(line["loss"] and line["reference_infonce"] > 0 for line in steps)
    assert steps[-1]["skipped_steps"] == 0


QUARTERS = (0.0, 0.25, 0.5, 0.75, 1.0)


@pytest.mark.parametrize(
    ("own", "kept", "at_least", "expected"),
    [
        ((0.1, 0.2, 0.3, 0.4, 0.5), (1, 0.95, 0.91, 0.8, 0.5), 0.9, 0.5),
        ((0.1, 0.2, 0.3, 0.4, 0.5), (1, 0.95, 0.91, 0.8, 0.5), 0.5, 1.0),
        ((0.1, 0.3, 0.3, 0.2, 0.1), (1, 1, 1, 1, 1), 0.9, 0.25),  # equal own scores: the smallest weight
        ((0.1, 0.2, 0.3, 0.4, 0.5), (1, 0.5, 0.6, 0.4, 0.3), 0.9, 0.5),  # none keeps enough
        ((0.1, 0.2, 0.5, 0.4, 0.3), (), 0.9, 0.5),
        ((), (1, 0.95, 0.91, 0.8, 0.5), 0.9, 0.5),
    ],
)
def test_the_rule_of_the_choice(own, kept, at_least, expected):
    by_weight = (dict(zip(QUARTERS, scores, strict=True)) if scores else {} for scores in (own, kept))
    choice = choose(*by_weight, at_least)
    assert choice.weight == expected
    # If the trained weights keep enough, there was room for more training.
    assert ("larger --lr" in choice.reason) == (expected == 1.0)


def test_a_training_that_did_not_help_is_said():
    by_weight = dict(zip(QUARTERS, (0.5, 0.4, 0.3, 0.2, 0.1), strict=True))
    assert "different --lr" in choose(by_weight, {}, 0.9).reason
    perfect = choose(dict.fromkeys(QUARTERS, 1.0), {}, 0.9).reason
    assert "harder validation data" in perfect and "--lr" not in perfect


def test_own_classes_have_the_accuracy_of_stock_openclip(start, shards, tmp_path):
    """Class folders and a table of labels give the same accuracy, in a run that only evaluates and in a training."""
    colors, images = ["red", "green", "blue", "yellow"], {}
    with tarfile.open(shards.replace("{00000..00006}", "00000")) as archive:
        for member in archive:
            if member.name.endswith(".png"):
                images[member.name] = archive.extractfile(member).read()
    rows = [("path", "label")]
    for number, (name, content) in enumerate(sorted(images.items())):
        file = tmp_path / "photos" / colors[number % 4] / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content)
        rows.append((str(file), colors[number % 4]))
    with open(tmp_path / "labels.csv", "w", newline="") as file:
        csv.writer(file).writerows(rows)
    model, _, preprocess = open_clip.create_model_and_transforms(SMALL_MODEL, pretrained=str(start))
    tokenizer = open_clip.get_tokenizer(SMALL_MODEL)
    with torch.no_grad():
        pixels = torch.stack([preprocess(Image.open(path).convert("RGB")) for path, _ in rows[1:]])
        texts = model.encode_text(tokenizer([f"a photo of a {color}" for color in colors]), normalize=True)
        nearest = (model.eval().encode_image(pixels, normalize=True) @ texts.T).argmax(dim=1).tolist()
    expected = sum(colors[place] == label for place, (_, label) in zip(nearest, rows[1:], strict=True)) / len(nearest)
    for name in ("photos", "labels.csv"):
        more = ["--model", SMALL_MODEL, "--pretrained", str(start), "--val-classes", str(tmp_path / name)]
        assert run(evaluation(tmp_path / "logs", name, *more)) == 0
        assert results_of(tmp_path / "logs" / name) == [{"classes_accuracy": pytest.approx(expected), "epoch": 0}]
    more += ["--keep-tasks", f"{tmp_path / 'photos'}::{tmp_path / 'labels.csv'}"]
    folder = runs.train(shards, tmp_path, "run", "openclip", *more)
    first, scores = results_of(folder)[0], scores_of(folder)["scores"]
    assert first["classes_accuracy"] == pytest.approx(expected)
    kept = {"kept_photos", "kept_labels"}  # a task may be called classes
    assert scores.keys() == {"classes", *kept}, "what is learned is also what is kept"
    assert all(first[name] == scores[name]["0"]["value"] for name in kept)


def test_tools_that_need_all_training_data_refuse_the_run(whole):
    with pytest.raises(UsageError, match=r"--keep-data.*--pretrained"):
        load_run(whole)


def finetune(*argv: str) -> list[str]:
    return ["--config", "finetune", "--pretrained", "start.pt", *argv]


@pytest.mark.parametrize(
    ("argv", "loss"),
    [
        ("--model ViT-B-32", "queueclip"),
        ("--model ViT-B-32 --loss queueclip", "queueclip"),
        ("--model ViT-B-16-SigLIP2", "siglip"),
        ("--model ViT-B-16-SigLIP2 --loss fastclip", "fastclip"),
        ("--model ViT-B-32 --siglip", "siglip"),
        ("--model coca_ViT-B-32", "openclip"),
        ("--model local-dir:captioner", "openclip"),
        ("--model demo-vit --pretrained sigmoid.pt", "siglip"),
        ("--model demo-vit --pretrained sigmoid.pt --loss openclip", "openclip"),
        ("--model local-dir:sigmoid", "siglip"),
    ],
)
def test_the_configuration_has_the_loss_of_the_start(argv, loss, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "captioner").mkdir()
    content = json.dumps({"model_cfg": {"multimodal_cfg": {}}})
    (tmp_path / "captioner" / "open_clip_config.json").write_text(content)
    (tmp_path / "sigmoid").mkdir()
    (tmp_path / "sigmoid" / "open_clip_config.json").write_text('{"model_cfg": {}}')
    for name in ("sigmoid.pt", "sigmoid/open_clip_pytorch_model.bin"):
        torch.save({"state_dict": {"module.logit_bias": torch.tensor(-10.0)}}, tmp_path / name)
    config = plan_of(*finetune(*argv.split()))
    assert config.loss.name == loss
    # Also with a loss of the user's choice, so that two losses are compared with equal settings.
    assert (config.loss.options.get("equal_captions") == "mask") == (loss == "queueclip" or "--loss" in argv)
    assert (config.keep.share, config.tuning.keep_at_least, config.schedule.warmup) == (0.25, 0.9, 0.1)


def test_the_configuration_follows_the_number_of_pairs_and_the_users_flags_win():
    config = parse([*finetune("--train-data", "x.tar", "--lr", "3e-5", "--wd", "0")])
    sizes = [37, 1000, 3000, 3001, 10**5, 10**7]
    sized = [resolve(config, pairs=pairs) for pairs in sizes]
    epochs, batches = [one.length.epochs for one in sized], [one.loading.batch_size for one in sized]
    assert epochs == sorted(epochs, reverse=True) and epochs[0] == epochs[2] > epochs[3] > epochs[-1]
    assert batches == sorted(batches) and batches[0] < sizes[0]
    assert {one.optimizer.lr for one in sized} == {3e-5} and {one.optimizer.weight_decay for one in sized} == {0}


def test_a_run_with_the_configuration(start, shards, tmp_path):
    given = small_command(shards, tmp_path, "run", "openclip", "--config", "finetune", "--pretrained", str(start))
    argv = [word for word in given if word != "--local-loss"]
    at = argv.index("--epochs")
    assert run([*argv[:at], *argv[at + 2 :], "--train-num-samples", "16"]) == 0
    flags = read_config(tmp_path / "run")["flags"]
    assert (flags["epochs"], flags["warmup"], flags["wd"], flags["batch_size"]) == (20, 3, 0.1, 16)


def test_the_warm_up_may_be_a_share_of_the_run(shards, tmp_path):
    rates = {}
    for name, warmup in (("share", "0.4"), ("steps", "4")):  # of 10 steps
        folder = runs.train(shards, tmp_path, name, "openclip", "--warmup", warmup)
        rates[name] = [line["lr"] for line in runs.metrics_of(folder) if "lr" in line]
    assert rates["share"] == rates["steps"] and rates["share"][3] == 1e-3 > rates["share"][2]
