"""``openclip-ext doctor`` prints one line per problem of a run, and returns an exit status for scripts."""

import re

import pytest
import torch

from openclip_ext.cli.errors import UsageError
from openclip_ext.data.manifest.find import find_or_create_manifest
from openclip_ext.diagnostics import doctor
from openclip_ext.diagnostics.doctor import main
from tests.training.runs import command, run


@pytest.fixture(autouse=True)
def _a_disk_with_one_free_tebibyte(tmp_path, monkeypatch):
    """Simulate 1 TiB of free disk space, because too little space on this machine would be one more problem."""
    usage = doctor.shutil.disk_usage(tmp_path)._replace(free=1 << 40)
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda folder: usage)


def lines_of(capsys, argv, status=0):
    with pytest.raises(SystemExit) as stop:
        main(argv)
    assert stop.value.code == status
    return capsys.readouterr().out.splitlines()


def found(lines, start):
    return [line for line in lines if line.startswith(start)]


def test_a_run_without_problems(shards, tmp_path, capsys):
    argv = command(shards, tmp_path, "run", "fastclip", "--save-every-steps", "2")
    lines = lines_of(capsys, ["--world-size", "2", *argv])
    for start in (
        "data: 84 samples, the manifest matches",
        "batch: 32 samples, 2 steps per epoch",
        "memory: a GPU needs 0.",
        f"folder: {tmp_path} has ",
    ):
        assert found(lines, f"ok       {start}"), start
    assert {line.split()[0] for line in lines} == {"ok"}
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("flags", "messages"),
    [
        (
            "--gpu-memory 0.01 --warmup 20 --hard-negative-key json:nope",
            "warning  memory: 1 rank: a GPU needs|warning  Lower --warmup 20|warning  memory: the estimate ignores hard "
            "negatives|warning  data: the first sample is bad: no hard negative: expected a|warning  folder: checkpoints are "
            "saved only at the end of an epoch",
        ),
        ("--lora-rank 4", "ok       memory: a GPU needs|warning  --lora-rank freezes random weights"),
        ("--batch-size 100", "ERROR    too few samples: the epoch has 84"),
        ("--epochs 100000000", "ERROR    folder: "),
        ("--logs /proc", "ERROR    folder: cannot write to /proc (No such file or directory): give another --logs"),
        ("--loss fastclip --dataset-resampled", "ERROR    --dataset-resampled: --loss fastclip needs each"),
        ("--world-size 2 --fsdp", "warning  memory: the estimate has all parameters on every GPU"),
        ("--world-size 2 --fsdp --opt timm/lamb", "ERROR    --fsdp"),
        ("--lock-image --lock-text --lock-text-freeze-layer-norm --loss sogclr", "ERROR    nothing is left"),
        ("--recipe cc3m --loss neuclip-paper", "warning  --recipe cc3m is for a global batch of 1,024"),
        ("--reference start --pretrained {folder}/weights.pt", "warning  model: not built and no memory estimated"),
        ("--model demo-vit --max-bad-fraction 0 --draw-captions", "ok       model: "),
        (
            "--model ViT-B-32 --pretrained laion2b_s34b_b79k --cache-dir none --force-patch-dropout 0",
            "warning  caches: laion/CLIP-ViT-B-32",
        ),
    ],
)
def test_what_a_run_would_stumble_over(shards, tmp_path, capsys, flags, messages):
    torch.save({}, tmp_path / "weights.pt")
    argv = [*command(shards, tmp_path, "run", "openclip"), *flags.format(folder=tmp_path).split()]
    lines = lines_of(capsys, argv, messages.startswith("ERROR") and 1)
    for message in messages.split("|"):
        assert found(lines, message), (message, lines)


def test_disk_space_has_the_tables_of_all_samples_and_the_average(shards, tmp_path, capsys):
    sizes = []
    for flags in ("", "--train-num-samples 40", "--model-ema-decay 0.9"):
        lines = lines_of(capsys, [*command(shards, tmp_path, "run", "fastclip"), *flags.split()])
        sizes.append(re.search(r"checkpoints of (\S+) GiB", "".join(found(lines, "ok       folder:")))[1])
    assert sizes[0] == sizes[1] < sizes[2]


def test_samples_that_the_manifest_excludes_are_not_counted_or_read(shards, tmp_path, capsys):
    data = find_or_create_manifest(shards)
    data.without(range(10)).save(tmp_path / "fewer.json")
    argv = [*command(shards, tmp_path, "run", "openclip"), "--manifest", str(tmp_path / "fewer.json")]
    assert found(lines_of(capsys, argv), "ok       data: 74 samples, the manifest matches")


@pytest.mark.parametrize(
    ("flags", "count"),
    [
        ("", 4),
        ("--save-frequency 2", 3),
        ("--save-frequency 0 --save-most-recent", 4),
        ("--delete-previous-checkpoint", 3),
        ("--delete-previous-checkpoint --save-most-recent", 5),
        ("--keep-best clip_val_loss", 5),
    ],
)
def test_the_number_of_checkpoints_on_the_disk(shards, tmp_path, capsys, flags, count):
    """The last epoch is always saved, and a new epoch_latest.pt or mid-epoch checkpoint is written next to the old ones."""
    argv = [*command(shards, tmp_path, "run", "openclip", "--epochs", "3", "--val-data", shards), *flags.split()]
    assert f" for {count} checkpoints" in found(lines_of(capsys, argv), "ok       folder:")[0]


def test_a_folder_with_a_run(shards, tmp_path, capsys):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").touch()
    argv = command(shards, tmp_path, "run", "openclip")
    assert found(lines_of(capsys, argv, 1), f"ERROR    folder: {tmp_path / 'run'} contains a run")
    assert not found(lines_of(capsys, [*argv, "--resume", "latest"]), "ERROR")


def test_the_memory_of_openclips_full_matrix(shards, tmp_path, capsys):
    argv = [word for word in command(shards, tmp_path, "run", "openclip") if word != "--local-loss"]
    assert found(lines_of(capsys, ["--world-size", "2", *argv]), "warning  memory: the estimate is for --local-loss")


def test_a_shell_of_several_tasks_needs_a_launcher(shards, tmp_path, monkeypatch, capsys):
    """For example, sbatch and salloc set SLURM_NTASKS in their shells. The training program reports the same error."""
    monkeypatch.setenv("SLURM_NTASKS", "2")
    argv = command(shards, tmp_path, "run", "openclip", "--save-every-steps", "2")
    assert found(lines_of(capsys, argv, status=1), "ERROR    launcher: ")
    with pytest.raises(UsageError, match="launcher: WORLD_SIZE or SLURM_NTASKS is 2"):
        run(argv)
