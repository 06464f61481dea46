"""The SLURM job for a run folder: which commands it runs, read by the command lines they are meant for."""

import os
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
from torch.distributed.run import get_args_parser

from eval.datacomp import parse_args
from eval.report.__main__ import build_parser

SCRIPT = Path(__file__).parents[2] / "scripts" / "slurm" / "datacomp_eval.sh"
pytestmark = pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    folder = tmp_path / "logs" / "my run"
    (folder / "checkpoints").mkdir(parents=True)
    (folder / "params.txt").write_text("lr: 0.1\nmodel: ViT-B-32\nmodel_ema: False\n")
    for name in ("epoch_1", "epoch_2", "epoch_10", "epoch_2_step_30", "epoch_latest"):
        (folder / "checkpoints" / f"{name}.pt").touch()
    (folder / "checkpoints" / "epoch_2.state").mkdir()
    return folder


def start(tmp_path: Path, *arguments: str, fails: str = "never", **variables: str) -> subprocess.CompletedProcess:
    """Runs the job with an ``srun`` that drops its options and a ``python`` that only writes down its arguments."""
    stubs = tmp_path / "stubs"
    stubs.mkdir(exist_ok=True)
    (stubs / "srun").write_text('#!/bin/bash\nwhile [[ $1 == --* ]]; do shift; done\nexec "$@"\n')
    record = 'printf "%q " "$@" >>"$CALLS"; echo >>"$CALLS"'
    (stubs / "python").write_text(f'#!/bin/bash\n{record}\n[[ "$*" != *{fails}* ]]\n')
    for stub in stubs.iterdir():
        stub.chmod(0o755)
    environment = {**os.environ, "PATH": f"{stubs}:{os.environ['PATH']}", "PYTHON": "python"}
    environment |= {"CALLS": str(tmp_path / "calls"), "SLURM_GPUS_ON_NODE": "4", "SLURM_JOB_ID": "123", **variables}
    return subprocess.run(["bash", str(SCRIPT), *arguments], env=environment, capture_output=True, text=True)


def calls(tmp_path: Path) -> list[list[str]]:
    lines = [shlex.split(line) for line in (tmp_path / "calls").read_text().splitlines()]
    (tmp_path / "calls").unlink()
    return lines


def evaluations(commands: list[list[str]]) -> list[str]:
    """Names of the checkpoints, after both parsers took the commands."""
    names = []
    for command in commands:
        assert command[:2] == ["-m", "torch.distributed.run"]
        launcher = get_args_parser().parse_args(command[2:])
        assert (launcher.nproc_per_node, launcher.master_port, launcher.training_script) == (
            "4",
            20123,
            "eval.datacomp",
        )
        args = parse_args(launcher.training_script_args)
        assert (args.model, args.data_dir) == ("ViT-B-32", Path("/data/with space"))
        names.append(Path(args.checkpoint).stem)
    return names


def test_all_checkpoints_in_order_and_then_the_report(tmp_path: Path, run_folder: Path) -> None:
    done = start(tmp_path, f"{run_folder}/", "/data/with space", "--tasks", "imagenet", "--batch-size", "64")
    assert done.returncode == 0, done.stderr
    *commands, report = calls(tmp_path)
    assert evaluations(commands) == ["epoch_1", "epoch_2", "epoch_2_step_30", "epoch_10"]
    assert parse_args(commands[0][commands[0].index("eval.datacomp") + 1 :]).tasks == ["imagenet"]
    assert report[:2] == ["-m", "eval.report"]
    args = build_parser().parse_args(report[2:])
    assert args.results == [str(run_folder)] and args.output == run_folder / "datacomp" / "report"


def test_the_configuration_of_the_run_reaches_the_evaluation(tmp_path: Path, run_folder: Path) -> None:
    (run_folder / "model_config").mkdir()
    config = run_folder / "model_config" / "ViT-B-32.json"
    config.touch()
    arguments = (str(run_folder), "/data/with space", "--image-interpolation", "random")
    assert start(tmp_path, *arguments, CHECKPOINTS="last").returncode == 0
    command, _ = calls(tmp_path)
    args = parse_args(command[command.index("eval.datacomp") + 1 :])
    assert (args.model_config, args.image_interpolation) == (str(config), "random")


def test_chosen_checkpoints(tmp_path: Path, run_folder: Path) -> None:
    arguments = (str(run_folder), Path("/data/with space"))
    assert start(tmp_path, *arguments, CHECKPOINTS="last").returncode == 0
    assert evaluations(calls(tmp_path)[:-1]) == ["epoch_10"]
    assert start(tmp_path, *arguments, CHECKPOINTS="epoch_2 epoch_latest").returncode == 0
    assert evaluations(calls(tmp_path)[:-1]) == ["epoch_2", "epoch_latest"]


def test_a_failure_stops_no_other_checkpoint_and_fails_the_job(tmp_path: Path, run_folder: Path) -> None:
    done = start(tmp_path, str(run_folder), "/data/with space", fails="epoch_2.pt")
    assert done.returncode == 1
    *commands, report = calls(tmp_path)
    assert len(evaluations(commands)) == 4 and "eval.report" in report


def test_wrong_folders(tmp_path: Path, run_folder: Path) -> None:
    done = start(tmp_path, str(run_folder))
    assert done.returncode == 2 and "usage: sbatch" in done.stderr
    (run_folder / "params.txt").write_text("lr: 0.1\n")
    done = start(tmp_path, str(run_folder), "/data")
    assert done.returncode == 2 and "names no model" in done.stderr
    (run_folder / "params.txt").write_text("model: RN50\n")
    for checkpoint in (run_folder / "checkpoints").glob("*.pt"):
        checkpoint.unlink()
    done = start(tmp_path, str(run_folder), "/data")
    assert done.returncode == 2 and "holds no epoch_K.pt" in done.stderr
    assert start(tmp_path, str(tmp_path / "none"), "/data").returncode != 0
