"""Full training runs: the files they write, the programs that can read these files, and errors for wrong input."""

import logging
import re
import shutil
import signal
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from openclip_ext.cli.errors import UsageError
from openclip_ext.data.shapes.write import ShapesConfig, write_shards
from openclip_ext.diagnostics.finished_run import load_run
from openclip_ext.evaluation.run_folder import read_config
from openclip_ext.training import trainer
from openclip_ext.training.checkpoint import saving
from openclip_ext.training.validation import Validation
from tests.training.runs import (
    EXIT_AFTER_SIGTERM,
    NUM_SAMPLES,
    SAMPLES_PER_SHARD,
    SMALL_MODEL,
    assert_same_run,
    command,
    evaluation,
    losses_of,
    metrics_of,
    results_of,
    run,
    small_command,
    stock_model,
    train,
)


@pytest.fixture(scope="module")
def finished(shards, tmp_path_factory):
    """Return a finished run with validation and TensorBoard."""
    more = ["--val-data", shards, "--report-to", "tensorboard", "--save-every-steps", "2", "--save-most-recent"]
    return train(shards, tmp_path_factory.mktemp("finished"), "run", "neuclip", *more)


def test_the_run_folder_has_what_openclip_users_look_for(finished):
    assert {"out.log", "params.txt", "config.json", "metrics.jsonl", "checkpoints", "tensorboard"} <= {
        path.name for path in finished.iterdir()
    }
    checkpoints = {path.name for path in (finished / "checkpoints").glob("*.pt")}
    # Mid-epoch checkpoints are removed at the end of an epoch.
    assert checkpoints == {"epoch_1.pt", "epoch_2.pt", "epoch_latest.pt"}
    stock_model(finished / "checkpoints" / "epoch_latest.pt", SMALL_MODEL)
    saved = torch.load(finished / "checkpoints" / "epoch_latest.pt", weights_only=True)
    assert {"epoch", "name", "state_dict", "optimizer"} <= set(saved)
    assert saved["epoch"] == 2
    assert list((finished / "tensorboard").iterdir())
    config = read_config(finished)
    assert config["loss"]["name"] == "neuclip"
    assert config["loss"]["options"]["prototypes"] == 24
    assert config["flags"]["batch_size"] == 16


def test_logs_have_a_line_for_each_step_and_evaluation(finished):
    steps = [line for line in metrics_of(finished) if "loss" in line]
    assert [line["step"] for line in steps] == list(range(10))
    assert [line["epoch"] for line in steps] == [0] * 5 + [1] * 5
    assert steps[-1]["samples"] == 160
    for line in steps:
        assert line["loss"] == pytest.approx(sum(line["terms"].values()))
        assert line["chance"] == pytest.approx(2.7726, abs=1e-3)
        assert {"infonce", "temperature", "lr", "samples_per_second", "data_time", "batch_time"} <= set(line)
    results = results_of(finished)
    assert [line["epoch"] for line in results] == [1, 2]
    assert {"image_to_text_R@1", "text_to_image_mean_rank", "clip_val_loss"} <= set(results[0])
    assert results[0]["num_samples"] == 84
    assert [line["step"] for line in metrics_of(finished) if "evaluation" in line] == [5, 10]


@pytest.mark.parametrize(
    ("loss", "flags"),
    [("openclip", ["--resume"]), ("siglip", ["--siglip", "--resume"]), ("queueclip", ["--pretrained"])],
)
def test_openclips_own_script_continues_from_a_checkpoint(shards, tmp_path, loss, flags):
    """With OpenCLIP's losses, both programs use the same optimizer groups. Other losses give OpenCLIP only their weights."""
    from open_clip_train import main as script

    assert run(command(shards, tmp_path, "ours", loss, "--epochs", "1")) == 0
    checkpoint = tmp_path / "ours" / "checkpoints" / "epoch_1.pt"
    argv = ["--model", "demo-vit", "--precision", "fp32", "--device", "cpu", "--dataset-type", "synthetic"]
    argv += ["--train-num-samples", "16", "--batch-size", "8", "--epochs", "2", "--workers", "0", "--lr", "1e-3"]
    root_handlers = list(logging.root.handlers)
    script.main([*argv, "--logs", str(tmp_path), "--name", "theirs", *flags, str(checkpoint)])
    logging.root.handlers[:] = root_handlers
    assert torch.load(tmp_path / "theirs" / "checkpoints" / "epoch_2.pt", weights_only=True)["epoch"] == 2


def test_a_checkpoint_of_openclips_script_can_be_continued(shards, finished, tmp_path, caplog):
    """Weights and optimizer continue at the checkpoint's epoch. The loss state starts from scratch, with a warning."""
    content = torch.load(finished / "checkpoints" / "epoch_1.pt", weights_only=True)
    content.pop("step")
    torch.save(content, tmp_path / "stock.pt")
    argv = small_command(shards, tmp_path, "continued", "neuclip", "--resume", str(tmp_path / "stock.pt"))
    assert run(argv) == 0
    assert "starts from scratch" in caplog.text
    assert [step for step, *_ in losses_of(tmp_path / "continued")] == list(range(5, 10))


def test_a_checkpoint_of_openclips_script_with_another_loss_names_the_ways_on(shards, finished, tmp_path):
    """Such a checkpoint does not say which loss trained it. A solved temperature is no parameter of the optimizer."""
    content = torch.load(finished / "checkpoints" / "epoch_1.pt", weights_only=True)
    content.pop("step")
    torch.save(content, tmp_path / "stock.pt")
    argv = small_command(shards, tmp_path, "other", "openclip", "--resume", str(tmp_path / "stock.pt"))
    with pytest.raises(
        UsageError, match=r"resume with the loss and the flags that wrote it, or .* --pretrained .*stock.pt"
    ):
        run(argv)


def test_resuming_a_finished_run_changes_nothing(shards, finished, tmp_path):
    shutil.copytree(finished, tmp_path / "run")
    assert run(small_command(shards, tmp_path, "run", "neuclip", "--resume", "latest", "--lr", "1")) == 0
    for name in ("metrics.jsonl", "config.json"):  # a finished run takes no more steps, so --lr 1 has no effect
        assert (tmp_path / "run" / name).read_bytes() == (finished / name).read_bytes()


def test_a_run_is_repeated_from_its_own_folder(finished, tmp_path):
    """The file has what the user typed, without the name and the folder, so flags after it win."""
    repeat = ["--config", str(finished / "config.json"), "--logs", str(tmp_path), "--name"]
    assert run([*repeat, "again"]) == 0
    assert_same_run(tmp_path / "again", finished)
    other = ["other", "--seed", "1", "--epochs", "1", "--val-frequency", "0"]
    assert run([*repeat, *other]) == 0
    assert losses_of(tmp_path / "other")[0] != losses_of(finished)[0]
    assert run(["--config", str(tmp_path / "other" / "config.json"), *repeat[2:], "third"]) == 0
    assert_same_run(tmp_path / "third", tmp_path / "other")


def test_a_dry_run_measures_a_step_and_writes_nothing(shards, tmp_path, capsys):
    more = ["--workers", "1", "--accum-freq", "2", "--batch-size", "8", "--resume", "latest", "--keep-best", "any"]
    assert run(small_command(shards, tmp_path, "dry", "neuclip", "--dry-run", *more)) == 0
    assert re.search(r"16 samples takes [\d.e-]+ s .* GiB of memory per rank.* 10 steps", capsys.readouterr().out)
    assert not (tmp_path / "dry").exists()


def test_a_resume_that_fails_names_the_changed_settings(shards, finished, tmp_path):
    """Without --pretrained, the default temperature scheme of neuclip is a different one."""
    argv = small_command(shards, tmp_path, "run", "neuclip", "--resume", "latest")
    pretrained = finished / "checkpoints" / "epoch_2.pt"
    assert run([*argv, "--pretrained", str(pretrained)], stop_after=2) == EXIT_AFTER_SIGTERM
    changed = rf"parameter groups\).*\. Changed settings: .*pretrained  \(before: {pretrained}\).*; temperature_scheme "
    with pytest.raises(UsageError, match=changed):
        run(argv)


def test_a_resume_heeds_new_settings_and_tells_them(shards, tmp_path, caplog):
    """The log reports loss options that were changed, added or removed, even if config.json is empty."""
    argv = small_command(shards, tmp_path, "run", "fastclip", "--resume", "latest")
    assert run([*argv, "--rho", "3"], stop_after=2) == EXIT_AFTER_SIGTERM
    (tmp_path / "run" / "config.json").write_text("")
    argv += ["--temperature-max", "0.5", "--wd", "0.9", "--beta1", "0.5"]
    assert run(argv, stop_after=1) == EXIT_AFTER_SIGTERM
    told = "beta1 0.5 (before: 0.9); rho 6.5 (before: 3.0); temperature_max 0.5 (before: 1.0); wd 0.9 (before: 0.2)."
    assert f"The run continues with changed settings: {told}" in caplog.text
    assert read_config(tmp_path / "run")["loss"]["options"]["rho"] == 6.5
    caplog.clear()
    assert run(argv) == 0
    assert "changed settings" not in caplog.text
    groups = torch.load(tmp_path / "run" / "checkpoints" / "epoch_2.pt", weights_only=True)["optimizer"]["param_groups"]
    assert {group["betas"] for group in groups} == {(0.5, 0.98)}
    assert {group["weight_decay"] for group in groups} == {0.0, 0.9}


def test_state_of_each_sample_is_not_used_for_other_data(shards, tmp_path, caplog):
    write_shards(tmp_path / "others", ShapesConfig(NUM_SAMPLES, 1, "train", SAMPLES_PER_SHARD), workers=1)
    others = str(tmp_path / "others" / Path(shards).name)
    fastclip, neuclip = (
        small_command(shards, tmp_path, loss, loss, "--resume", "latest") for loss in ("fastclip", "neuclip")
    )
    assert [run([*argv, "--epochs", "1"]) for argv in (fastclip, neuclip)] == [0, 0]
    with pytest.raises(UsageError, match="data: checkpoint"):
        run([*fastclip, "--train-data", others])
    assert run([*neuclip, "--train-data", others]) == 0
    assert "different data of the same size" in caplog.text
    with pytest.raises(UsageError, match="is not the run's training data"):
        load_run(tmp_path / "fastclip", "epoch_1.pt", train_data=others)


def test_a_resume_with_more_data_or_another_batch_names_the_cure(shards, tmp_path, caplog):
    """One message. Its cure works: the same global batch, or a new run from the weights."""
    fewer = shards.replace("6}", "5}")
    first = small_command(fewer, tmp_path, "first", "openclip", "--resume", "latest", "--epochs", "1")
    assert run(first, stop_after=2) == EXIT_AFTER_SIGTERM
    with pytest.raises(UsageError, match=r"--global-batch 16.*--accum-freq.*full epoch.*--name"):
        run([*first, "--batch-size", "8"])
    assert run([*first, "--batch-size", "8", "--global-batch", "16"]) == 0
    weights = str(tmp_path / "first" / "checkpoints" / "epoch_1.pt")
    more = small_command(shards, tmp_path, "first", "openclip", "--epochs", "2")
    with pytest.raises(UsageError, match=f"checkpoint 72, run 84.*--pretrained {weights}"):
        run([*more, "--resume", "latest"])
    assert "same size" not in caplog.text
    assert run([*more, "--name", "more", "--pretrained", weights, "--epochs", "1"]) == 0


def fail(self, encoder):
    raise RuntimeError("the data server is down")


def test_an_evaluation_that_fails_ends_a_program_that_does_nothing_else(shards, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(Validation, "score", fail)
    with pytest.raises(RuntimeError, match="the data server is down"):
        run(evaluation(tmp_path, "run", "--val-data", shards, "--logs", "none"))
    assert "The evaluated model is untrained" in caplog.text


def test_sigusr1_saves_and_goes_on(shards, tmp_path, monkeypatch):
    class Asking(trainer.SignalRequests):
        def poll_ranks(self, now=False):
            if (call := next(calls)) == 3:
                signal.raise_signal(signal.SIGUSR1)
            request = super().poll_ranks(now)
            if call == 4:
                saved.extend(path.name for path in (tmp_path / "run" / "checkpoints").glob("*.pt"))
            return request

    calls, saved = iter(range(1, 100)), []
    monkeypatch.setattr(trainer, "SignalRequests", Asking)
    assert run(small_command(shards, tmp_path, "run", "openclip", "--epochs", "1", "--log-every-n-steps", "3")) == 0
    assert saved == ["epoch_0_step_3.pt"]
    assert [step for step, *_ in losses_of(tmp_path / "run")] == [0, 3, 4]  # an epoch's last step is always logged


def test_a_failing_evaluation_costs_nothing_and_is_made_up_for(shards, tmp_path, monkeypatch, caplog):
    argv = small_command(
        shards, tmp_path, "run", "openclip", "--epochs", "1", "--val-data", shards, "--resume", "latest"
    )
    with monkeypatch.context() as broken:
        broken.setattr(Validation, "score", fail)
        assert run(argv) == 0
    assert "the data server is down" in caplog.text
    assert (tmp_path / "run" / "checkpoints" / "epoch_1.pt").is_file()
    assert run(argv) == 0  # a restart runs the missing evaluation
    assert [line["epoch"] for line in results_of(tmp_path / "run")] == [1]


def test_datacomp_joins_the_metrics_after_the_checkpoint_is_safe(shards, tmp_path, monkeypatch):
    from openclip_ext.evaluation.tasks import TASKS
    from tests.evaluation import datasets

    datasets.make_task(tmp_path / "data", "cifar10", count=12)
    monkeypatch.setitem(TASKS, "cifar10", replace(TASKS["cifar10"], size=12))
    more = ["--eval-suite", "quick", "--eval-data-dir", str(tmp_path / "data"), "--eval-frequency", "2"]
    more += ["--val-data", shards, "--val-frequency", "0"]  # never
    assert run(small_command(shards, tmp_path, "run", "openclip", *more, "--epochs", "3")) == 0
    evaluations = [line for line in metrics_of(tmp_path / "run") if "evaluation" in line]
    assert [line["epoch"] for line in evaluations] == [2, 3]  # after every second epoch, and after the last epoch
    assert 0.0 <= evaluations[0]["evaluation"]["datacomp/cifar10"] <= 1.0
    assert "clip_val_loss" not in evaluations[1]["evaluation"]


def test_delete_previous_keeps_the_newest_epoch_only(shards, tmp_path):
    more = ["--delete-previous-checkpoint", "--save-frequency", "2", "--epochs", "5"]
    assert run(small_command(shards, tmp_path, "run", "openclip", *more)) == 0
    assert {path.name for path in (tmp_path / "run" / "checkpoints").iterdir()} == {"epoch_5.pt", "epoch_5.state"}


def test_each_step_is_saved_once(shards, tmp_path, monkeypatch):
    """With --save-every-steps 5, a step at the end of an epoch is saved as this epoch, or mid-epoch if no epoch is saved."""
    saved = []
    save = saving.save
    monkeypatch.setattr(saving, "save", lambda folder, name, *rest: saved.append(name) or save(folder, name, *rest))
    argv = small_command(shards, tmp_path, "run", "openclip", "--epochs", "3")
    assert run([*argv, "--save-every-steps", "5", "--save-frequency", "2"]) == 0
    assert saved == ["epoch_0_step_5", "epoch_2", "epoch_3"]
