"""Unsupported models, losses and data raise a one-sentence error. ``test_mistakes.py`` tests wrong flags."""

import json

import open_clip
import pytest

from openclip_ext.cli.errors import UsageError
from openclip_ext.losses.registry import create_loss
from openclip_ext.training.checks import check_combination, other_batch
from tests.training.commands import plan_of
from tests.training.runs import metrics_of, run, small_command
from tests.training.test_models import CAPTIONER


def test_wandb_that_is_missing_is_told(shards, tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UsageError, match="needs the package wandb: pip install wandb"):
        run(small_command(shards, tmp_path, "run", "openclip", "--report-to", "wandb"))


@pytest.mark.parametrize(("batch_size", "told"), [([], True), (["--batch-size", "1024"], False)])
def test_a_recipe_on_fewer_gpus_tells_its_batch(batch_size, told):
    config = plan_of("--recipe", "cc3m", "--loss", "neuclip-paper", *batch_size)
    message = other_batch(config, config.loading.batch_size, 1) or ""
    assert ("for a global batch of 1,024, but this run has 128: give --batch-size 1024" in message) == told


@pytest.mark.parametrize(("flags", "told"), [(["--local-loss"], True), (["--local-loss", "--gather-with-grad"], False)])
def test_hard_negatives_without_a_gradient_are_refused(flags, told):
    config = plan_of("--hard-negative-key", "txt", *flags)
    loss = create_loss("openclip", **config.loss.options)
    if not told:
        return check_combination(config, loss, 2, False)
    with pytest.raises(UsageError, match="--local-loss without --gather-with-grad"):
        check_combination(config, loss, 2, False)


RESNET = "--model demo-resnet --force-patch-dropout 0"
LOCKED = "--lock-image --lock-text --lock-text-freeze-layer-norm --temperature-scheme constant"


@pytest.mark.parametrize(
    ("loss", "flags", "message"),
    [
        ("openclip", "--torchscript", "--torchscript cannot train"),
        ("openclip", "--lock-text", "--lock-text needs --lock-text-freeze-layer-norm"),
        ("openclip", f"{RESNET} --lock-image --lock-image-unlocked-groups 99", "99 is not possible for this model"),
        ("queueclip", f"{RESNET} {LOCKED}", "nothing is left to train"),
        ("openclip", "--model-ema-decay 0.9 --loss cliplite", "would not average"),
        ("siglip", "--equal-captions mask", "--equal-captions: not used by the loss 'siglip'"),
        ("fastclip", "--dataset-resampled", "--dataset-resampled: --loss fastclip needs each sample once"),
        ("openclip", "--eval-suite quick --eval-data-dir /nothing", "nothing"),
        ("openclip", "--keep-best top1", "--keep-best needs --logs, and an evaluation"),
    ],
)
def test_what_the_model_the_loss_or_the_data_cannot_do_is_told(shards, tmp_path, loss, flags, message):
    with pytest.raises(ValueError, match=message):
        run(small_command(shards, tmp_path, "run", loss, *flags.split()))


@pytest.mark.parametrize(
    ("loss", "flags", "is_refused"),
    [
        ("openclip", "", True),
        ("siglip", "", True),
        ("queueclip", "", True),
        ("openclip", "--accum-freq 2", False),
        ("openclip", "--model CAPTIONER", False),
        ("openclip", "--hard-negative-key txt", False),
        ("queueclip", "--hard-negative-key txt", True),
    ],
)
def test_a_global_batch_of_one_pair_is_refused_if_the_loss_learns_nothing(shards, tmp_path, loss, flags, is_refused):
    """A captioner's captions and hard negatives also train with one pair."""
    (tmp_path / "captioner.json").write_text(json.dumps(CAPTIONER))
    open_clip.add_model_config(tmp_path)
    argv = small_command(
        shards, tmp_path, "run", loss, "--batch-size", "1", "--epochs", "1", "--train-num-samples", "4"
    )
    argv += ["--force-patch-dropout", "0", *flags.replace("CAPTIONER", "captioner").split()]
    if not is_refused:
        assert run(argv) == 0
        assert metrics_of(tmp_path / "run")[0]["loss"] > 0
        return
    with pytest.raises(UsageError, match=r"--batch-size.*--accum-freq"):
        run(argv)


@pytest.mark.parametrize(
    ("flags", "word"),
    [
        ("--fsdp", "--fsdp"),
        ("--precision pure_bf16 --lr 1e-6", "amp_bf16"),
        ("--precision bf16 --lr 1e-4", "amp_bf16"),
        ("--precision pure_bf16 --lr 5e-4", None),
        ("--precision pure_bf16 --lr 1e-6 --lr-text 1e-3", None),
    ],
)
def test_a_flag_without_the_expected_effect_warns(shards, tmp_path, caplog, flags, word):
    more = ["--epochs", "1", "--force-patch-dropout", "0", *flags.split()]
    assert run(small_command(shards, tmp_path, "run", "openclip", *more)) == 0
    for known in ("--fsdp", "amp_bf16"):
        assert (known in caplog.text) == (known == word)


@pytest.mark.parametrize("mistake", [["--batch-size", "100"], ["--max-bad-fraction", "0", "--image-key", "nope"]])
def test_the_corrected_command_works_after_a_start_that_failed(shards, tmp_path, mistake):
    right = small_command(shards, tmp_path, "mine", "openclip", "--epochs", "1")
    with pytest.raises(ValueError, match=r"too few samples|no sample with both an image"):
        run([*right, *mistake])
    assert not (tmp_path / "mine").exists()
    in_new_folders = small_command(shards, tmp_path / "new" / "runs", "mine", "openclip", *mistake)
    with pytest.raises(ValueError, match=r"too few samples|no sample with both an image"):
        run(in_new_folders)
    assert not (tmp_path / "new").exists()
    assert run(right) == 0


def test_a_start_that_was_killed_is_no_run(shards, tmp_path):
    folder = tmp_path / "mine"
    (folder / "checkpoints").mkdir(parents=True)
    for name in ("out.log", ".lock", "params.txt", "config.json"):
        (folder / name).touch()
    assert run(small_command(shards, tmp_path, "mine", "openclip", "--epochs", "1")) == 0
