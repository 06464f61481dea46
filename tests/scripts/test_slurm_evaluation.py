"""The SLURM job that evaluates a run folder: the real parsers accept the commands that it runs."""

import os
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
from torch.distributed.run import get_args_parser

from openclip_ext.evaluation.datacomp import parse_args
from openclip_ext.evaluation.report.__main__ import build_parser

SCRIPT = Path(__file__).parents[2] / "scripts" / "slurm" / "datacomp_eval.sh"


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    folder = tmp_path / "logs" / "my run"
    (folder / "checkpoints").mkdir(parents=True)
    for name in ("epoch_1", "epoch_2", "epoch_10", "epoch_2_step_30", "epoch_latest"):
        (folder / "checkpoints" / f"{name}.pt").touch()
    return folder


def start(tmp_path: Path, *arguments: str, fails: str = "never", **variables: str) -> subprocess.CompletedProcess:
    """Run the job script with a fake ``srun`` that drops its options, and a fake ``python`` that records its arguments."""
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
    return [shlex.split(line) for line in (tmp_path / "calls").read_text().splitlines()]


def evaluations(commands: list[list[str]]) -> list[str]:
    """Return the names of the evaluated checkpoints; assert that both parsers (torchrun's and ours) accept the commands."""
    names = []
    for command in commands:
        assert command[:2] == ["-m", "torch.distributed.run"]
        launcher = get_args_parser().parse_args(command[2:])
        assert (launcher.nproc_per_node, launcher.master_port) == ("4", 20123)
        assert launcher.training_script == "eval.datacomp"
        args = parse_args(launcher.training_script_args)
        assert (args.model, args.data_dir) == (None, Path("/data/with space"))
        names.append(Path(args.checkpoint).stem)
    return names


def test_all_checkpoints_in_order_and_then_the_report(tmp_path: Path, run_folder: Path):
    """If the evaluation of a checkpoint fails, the job evaluates the others, and then fails."""
    done = start(tmp_path, f"{run_folder}/", "/data/with space", fails="epoch_2.pt")
    assert done.returncode == 1, done.stderr
    *commands, report = calls(tmp_path)
    assert evaluations(commands) == ["epoch_1", "epoch_2", "epoch_2_step_30", "epoch_10"]
    assert report[:2] == ["-m", "eval.report"]
    args = build_parser().parse_args(report[2:])
    assert args.results == [str(run_folder)] and args.output == run_folder / "datacomp" / "report"


def test_the_last_checkpoint_with_flags_and_the_configuration_of_the_run(tmp_path: Path, run_folder: Path) -> None:
    config = run_folder / "model_config" / "ViT-B-32.json"
    config.parent.mkdir()
    config.touch()
    arguments = (str(run_folder), "/data/with space", "--image-interpolation", "random")
    assert start(tmp_path, *arguments, CHECKPOINTS="last").returncode == 0
    *commands, _ = calls(tmp_path)
    assert evaluations(commands) == ["epoch_10"]
    args = parse_args(commands[0][commands[0].index("eval.datacomp") + 1 :])
    assert (args.model_config, args.image_interpolation) == (str(config), "random")


def test_what_is_no_run_is_refused(tmp_path: Path, run_folder: Path) -> None:
    assert "CHECKPOINTS=best: expected all or last" in start(tmp_path, str(run_folder), "D", CHECKPOINTS="best").stderr
    shutil.rmtree(run_folder / "checkpoints")
    assert "has no epoch_K.pt" in start(tmp_path, str(run_folder), "D").stderr
