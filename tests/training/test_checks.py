"""Mistakes are told in one sentence, before the model is built and before anything is written."""

import subprocess
import sys

import pytest
import torch

from openclip_ext.training import run as program
from openclip_ext.training.checks import tell_other_batch
from openclip_ext.training.config import training_config
from openclip_ext.training.errors import UsageError
from openclip_ext.training.flags import parse
from tests.training.runs import command, run

MISTAKES: dict[str, tuple[list[str], str]] = {
    "model": (["--model", "ViT-B/33"], r"unknown model --model ViT-B/33; did you mean ViT-B-32\?"),
    "tag": (
        ["--model", "RN50", "--pretrained", "cc13m"],
        r"no.* a tag of RN50; did you mean cc12m\?; tags of RN50: openai",
    ),
    "file": (["--pretrained", "no/such.pt"], "--pretrained no/such.pt is neither a file nor a tag of demo-vit"),
    "imagenet": (["--imagenet-val", "/no/folder"], "--imagenet-val /no/folder is no folder"),
    "imagenet-v2": (["--imagenet-v2", "/no/folder"], "--imagenet-v2 /no/folder is no folder"),
    "val-data": (["--val-data", "/no/{0..3}.tar"], r"--val-data: 4 of 4 files are not there, the first is /no/0\.tar"),
    "val-csv": (["--val-data", "/no/x.csv"], r"--val-data: 1 of 1 files are not there, the first is /no/x\.csv"),
    "timm-without-lr": (["--opt", "timm/lamb"], "--opt timm/lamb needs --lr"),
    "lamp": (["--opt", "timm/lamp", "--lr", "1"], r"unknown optimizer --opt 'timm/lamp'.*did you mean timm/lamb\?"),
    "one-beta": (["--opt", "timm/lamb", "--lr", "1", "--beta1", "0.9"], "both --beta1 and --beta2"),
    "schedule": (["--lr-scheduler", "cos"], "--lr-scheduler cos: expected one of cosine, const"),
    "lookahead": (["--lookahead-steps", "5"], "an optimizer with LookAhead, such as --opt timm/lookahead_sgd"),
    "optimizer": (["--opt", "sgd"], "unknown optimizer"),
    "epochs": (["--epochs", "0"], "--epochs 0: expected an integer >= 1; to evaluate only"),
    "augmentation": (["--aug-cfg", "foo=3"], "--aug-cfg: got an unexpected keyword argument 'foo'"),
    "temperature": (["--temperature", "14"], r"--temperature 14: expected at most 1.*give --temperature 0\.07143"),
    "report": (["--report-to", "paper"], "--report-to paper"),
    "nothing-to-do": (["--train-data", ""], "nothing to do: give --train-data"),
    "train-data": (
        ["--train-data", "/no/{0..3}.tar"],
        r"--train-data: none of the 4 files is there, the first is /no/0\.tar",
    ),
    "trace": (["--trace"], "--trace is for evaluation only"),
    "patience": (["--rank-patience", "0"], "--rank-patience: '0': expected a number > 0"),
    "skipped": (["--max-skipped-steps", "0"], "--max-skipped-steps: '0': expected an integer >= 1"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_told_before_the_model_is_built(shards, tmp_path, monkeypatch, name):
    flags, message = MISTAKES[name]
    monkeypatch.setattr(program, "build_model", lambda *_: pytest.fail("the model was built"))
    argv = command(shards, tmp_path, "run", "fastclip", *flags)
    if name == "timm-without-lr":
        position = argv.index("--lr")
        del argv[position : position + 2]
    with pytest.raises(UsageError, match=message):
        run(argv)
    assert not (tmp_path / "run").exists()


def test_wandb_that_is_missing_is_told(shards, tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UsageError, match="needs the package wandb, which is not installed: pip install wandb"):
        run(command(shards, tmp_path, "run", "openclip", "--report-to", "wandb"))


@pytest.mark.parametrize(("batch_size", "told"), [([], True), (["--batch-size", "1024"], False)])
def test_a_recipe_on_fewer_gpus_tells_its_batch(batch_size, told, caplog):
    args, loss = parse(["--recipe", "cc3m", "--loss", "neuclip", "--train-data", "x.tar", "--name", "run", *batch_size])
    args.local_rank = 0
    tell_other_batch(training_config(args, loss, torch.device("cpu")))
    assert ("for a global batch of 1,024, and this run's is 128: give --batch-size 1024" in caplog.text) == told


RESNET = ["--model", "demo-resnet", "--force-patch-dropout", "0"]
LOCKED = ["--lock-image", "--lock-text", "--lock-text-freeze-layer-norm", "--temperature-scheme", "constant"]


@pytest.mark.parametrize(
    ("loss", "flags", "message"),
    [
        ("openclip", ["--lock-text"], "--lock-text needs --lock-text-freeze-layer-norm"),
        (
            "openclip",
            [*RESNET, "--lock-image", "--lock-image-unlocked-groups", "99"],
            "--lock-image-unlocked-groups 99 is not possible for this model",
        ),
        ("queueclip", [*RESNET, *LOCKED], "nothing is left to train"),
        ("openclip", ["--model-ema-decay", "0.9", "--loss", "cliplite"], "would not average"),
        ("siglip", ["--equal-captions", "mask"], "--equal-captions: not used by the loss 'siglip'.*without labels"),
        ("queueclip", ["--equal-captions", "mask"], "--equal-captions mask: the queue keeps"),
        ("amorlip", ["--equal-captions", "positive"], "room for one positive pair"),
        ("fastclip", ["--train-data", "nowhere/{00000..00003}.tar"], "nowhere"),
        ("fastclip", ["--batch-size", "100"], "too few samples"),
        ("fastclip", ["--dataset-resampled"], "--dataset-resampled draws samples with replacement"),
        ("fastclip", ["--resume", "no/such/epoch_1.pt"], "does not exist"),
        ("openclip", ["--eval-suite", "quick", "--eval-data-dir", "/nothing"], "nothing"),
        ("openclip", ["--keep-best", "top1"], "--keep-best needs an evaluation"),
    ],
)
def test_what_the_model_the_loss_or_the_data_cannot_do_is_told(shards, tmp_path, loss, flags, message):
    with pytest.raises(ValueError, match=message):
        run(command(shards, tmp_path, "run", loss, *flags))


@pytest.mark.parametrize("mistake", [["--batch-size", "100"], ["--max-bad-fraction", "0", "--image-key", "nope"]])
def test_the_corrected_command_works_after_a_start_that_failed(shards, tmp_path, mistake):
    right = command(shards, tmp_path, "mine", "openclip", "--epochs", "1")
    with pytest.raises(ValueError):
        run([*right, *mistake])
    assert not (tmp_path / "mine").exists()
    assert run(right) == 0


def test_a_start_that_was_killed_is_no_run(shards, tmp_path):
    folder = tmp_path / "mine"
    (folder / "checkpoints").mkdir(parents=True)
    for name in ("out.log", ".lock", "params.txt", "config.json"):
        (folder / name).touch()
    assert run(command(shards, tmp_path, "mine", "openclip", "--epochs", "1")) == 0


def test_lamb_needs_no_eps(shards, tmp_path):
    assert run(command(shards, tmp_path, "run", "openclip", "--opt", "timm/lamb", "--epochs", "1")) == 0


def test_flags_without_effect_say_so(shards, tmp_path, caplog):
    flags = ["--local-loss", "--loss-dist-impl", "gather", "--coca-caption-loss-weight", "1", "--epochs", "1"]
    assert run(command(shards, tmp_path, "run", "fastclip", *flags)) == 0
    said = "Without effect on --loss fastclip: --coca-caption-loss-weight, --local-loss, --loss-dist-impl."
    assert said in caplog.text


def write_csv(folder, rows: int, encoding: str = "utf-8"):
    path = folder / "pairs.csv"
    lines = ["filepath\ttitle", *(f"{folder}/{row}.png\tcafé {row}" for row in range(rows))]
    path.write_bytes("\n".join(lines).encode(encoding))
    return path


def csv_run(path, tmp_path) -> list[str]:
    return ["--train-data", str(path), "--epochs", "1", "--batch-size", "4"]


def test_a_csv_in_another_encoding_is_named(shards, tmp_path):
    path = write_csv(tmp_path, 8, "latin-1")
    with pytest.raises(ValueError, match=r"pairs\.csv is not UTF-8 text"):
        run([*command(shards, tmp_path, "run", "openclip"), *csv_run(path, tmp_path)])


def test_missing_images_of_a_csv_are_named_by_row(shards, tmp_path, caplog):
    path = write_csv(tmp_path, 8)
    with pytest.raises(Exception, match=r"row [0-7]: .*png cannot be read") as found:
        run([*command(shards, tmp_path, "run", "openclip"), *csv_run(path, tmp_path)])
    assert type(found.value).__name__ == "BadDataError"


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (
            ["--model", "demo-vitt", "--train-data", "x"],
            "error: unknown model --model demo-vitt; did you mean demo-vit?",
        ),
        (["--train-data", "no.csv"], "error: --train-data: none of the 1 files is there, the first is no.csv"),
        (["--loss", "neuclp", "--train-data", "x"], "error: unknown loss 'neuclp'"),
    ],
)
def test_the_program_prints_a_sentence(tmp_path, argv, message):
    base = ["--model", "demo-vit", "--device", "cpu", "--precision", "fp32", "--logs", "none"]
    started = [sys.executable, "-m", "openclip_ext.training.main", *base, *argv]
    result = subprocess.run(started, capture_output=True, text=True, cwd=tmp_path)
    assert result.returncode == 2
    first, *_, last = result.stderr.strip().splitlines()
    assert "importing PyTorch and OpenCLIP" in first
    assert last.startswith(message)
    assert "Traceback" not in result.stderr


def test_the_program_says_in_its_first_second_that_there_is_nothing_to_do(tmp_path):
    program = "import sys; from openclip_ext.training import main; main.cli()"
    started = [sys.executable, "-X", "importtime", "-c", program, "--loss", "neuclip"]
    result = subprocess.run(started, capture_output=True, text=True, cwd=tmp_path)
    assert result.returncode == 2
    assert "error: nothing to do: give --train-data" in result.stderr
    assert " torch\n" not in result.stderr  # which takes seconds to import
    assert not list(tmp_path.iterdir())
