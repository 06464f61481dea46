"""Faults outside the program: every loss of data is reported, and unreadable files are not overwritten."""

import contextlib
import logging
import math
import multiprocessing
import os
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from filelock import FileLock
from safetensors.torch import load_file

from openclip_ext import create_loss, distributed
from openclip_ext.cli.errors import UsageError
from openclip_ext.data.manifest.manifest import Manifest
from openclip_ext.diagnostics.inspect.__main__ import main as inspect
from openclip_ext.evaluation.command_line import load_encoder
from openclip_ext.evaluation.datacomp import parse_args
from openclip_ext.evaluation.embed import main as write_reference
from openclip_ext.evaluation.run_folder import read_config
from openclip_ext.export.__main__ import export
from openclip_ext.integrations.model_loss import ModelLoss
from openclip_ext.training import trainer
from openclip_ext.training.checkpoint import saving
from openclip_ext.training.config import RunFolderConfig
from openclip_ext.training.main import main
from openclip_ext.training.runtime import heartbeat, run_folder, signals
from openclip_ext.training.step import TrainStep
from openclip_ext.training.trainer import SaveFailed, TrainingDiverged
from openclip_ext.training.validation import Validation
from tests.data.loading import build, indices, preprocess, train_with_a_fork_server
from tests.data.shards import undecodable, write_shards
from tests.distributed.pool import two_ranks
from tests.training.programs import LOGS, Program, children_of, is_alive, lines_of, wait_until
from tests.training.runs import (
    EXIT_AFTER_SIGTERM,
    assert_same_run,
    command,
    contents,
    flip_a_bit,
    losses_of,
    results_of,
    run,
    run_on_two_ranks,
    small_command,
    spoil_samples,
    train,
)
from tests.training.tiny import tiny_model


@pytest.fixture
def two_trainers(shards, tmp_path):
    """Yield a run on two ranks that has taken three steps."""
    argv = [*small_command(shards, tmp_path, "run", "openclip", "--epochs", "200"), "--batch-size", "8"]
    program = Program([*argv, "--rank-patience", "10"], 2, tmp_path / "output")
    try:
        program.wait_for_step(tmp_path / "run", 3)
        yield program
    finally:
        program.kill()


def disk_is_full(*_):
    raise OSError(28, "No space left on device")


@pytest.fixture(scope="module")
def whole(shards, tmp_path_factory):
    return train(shards, tmp_path_factory.mktemp("whole"), "run", "fastclip", "--val-data", shards)


def test_two_ranks_fall_back_together_to_the_newest_readable_checkpoint(shards, tmp_path):
    """Rank 0 renames corrupt and foreign files before rank 1 reads the folder. Truncated log lines are removed."""
    argv = [*small_command(shards, tmp_path, "run", "fastclip", "--val-data", shards), "--batch-size", "8"]
    run_on_two_ranks(argv)
    shutil.copytree(tmp_path / "run", tmp_path / "whole")
    checkpoints = tmp_path / "run" / "checkpoints"
    damaged = flip_a_bit(checkpoints / "epoch_2.state" / "step_10" / "rank_0001.pt")
    torch.save([1, 2, 3], checkpoints / "epoch_9.pt")
    foreign = (checkpoints / "epoch_9.pt").read_bytes()
    for log in (tmp_path / "run" / "metrics.jsonl", checkpoints / "results.jsonl"):
        with open(log, "a") as lines:
            lines.write('{"step": 3, "epoch": 1, "los')
    run_on_two_ranks([*argv, "--resume", "latest"])
    assert_same_run(tmp_path / "run", tmp_path / "whole")
    assert (checkpoints / "epoch_2.state.unreadable" / "step_10" / "rank_0001.pt").read_bytes() == damaged
    assert (checkpoints / "epoch_9.pt.unreadable").read_bytes() == foreign
    assert [line["epoch"] for line in results_of(tmp_path / "run")] == [1, 2]
    told = (tmp_path / "run" / "out.log").read_text()
    assert "epoch_2.pt is corrupt: checksum mismatch in " in told and "epoch_9.pt: expected a checkpoint" in told


# --- faults that end a run --------------------------------------------------------------------------------------------


def start_on_a_full_disk(patch):
    """The log file is closed, because no line could be written."""
    patch.setattr(os, "fsync", disk_is_full)
    patch.setattr(logging.FileHandler, "_open", lambda handler: open("/dev/full", "a"))  # noqa: SIM115


def fill_the_disk(patch):
    patch.setattr(saving, "save", disk_is_full)


def stop_in_an_evaluation_on_a_full_disk(patch):
    def evaluate(self, encoder):
        fill_the_disk(patch)
        signal.raise_signal(signal.SIGTERM)
        return {}

    patch.setattr(Validation, "score", evaluate)


def allow_small_files_only(patch):
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


def break_the_heads(patch):
    def step(self, batches, number=0, take=TrainStep.__call__):
        terms = take(self, batches, number)
        next(self.loss.model_head().parameters()).data.fill_(math.nan)
        return terms

    patch.setattr(TrainStep, "__call__", step)


class Fault(NamedTuple):
    """What ends a run, how the run ends, and what is left: the number of logged steps, and the checkpoints."""

    bring_in: Callable[[pytest.MonkeyPatch], object]
    error: type[Exception]
    said: str
    steps: int = 0
    saved: tuple[str, ...] = ()
    loss: str = "openclip"
    flags: str = ""
    stop_after: int | None = None
    logged: str = ""


# Adam changes every parameter by about the learning rate in a step, so the features overflow.
DIVERGES = "--opt timm/adamw --lr 1e30 --warmup 0 --save-every-steps 1 --wd 1e30"
FULL = "could not be saved: .*No space left"
FAULTS = {
    "full disk at the start": Fault(start_on_a_full_disk, UsageError, "cannot write to the run folder .*No space left"),
    # A SLURM script would requeue a run with the exit status of SIGTERM.
    "full disk at a stop": Fault(fill_the_disk, SaveFailed, rf"epoch_0_step_3\.pt {FULL}", 3, stop_after=3),
    "full disk at a stop between epochs": Fault(
        stop_in_an_evaluation_on_a_full_disk,
        SaveFailed,
        rf"epoch_1_step_5\.pt {FULL}",
        5,
        flags="--val-data SHARDS --save-frequency 2",
    ),
    "file size limit": Fault(
        allow_small_files_only,
        SaveFailed,
        r"epoch_2\.pt could not be saved",
        10,
        logged=r"(?s)epoch_1\.pt could not be saved.*The run ended: the last checkpoint",
    ),
    "overflow": Fault(lambda patch: None, TrainingDiverged, "not finite after step", 1, flags=DIVERGES),
    "heads": Fault(
        break_the_heads, TrainingDiverged, "not finite after step 1", 1, (), "cliplite", "--save-every-steps 1"
    ),
    "skipped steps in a row": Fault(
        lambda patch: spoil_samples(patch, range(2, 9)),
        TrainingDiverged,
        "3 steps in a row were not finite",
        5,
        ("epoch_0_step_5.pt",),
        "fastclip",
        "--max-skipped-steps 3",
    ),
    # The run has fewer steps than --max-skipped-steps, so this limit does not stop it.
    "only skipped steps": Fault(
        lambda patch: spoil_samples(patch, range(10)),
        TrainingDiverged,
        "all 10 steps of the run were skipped",
        10,
        ("epoch_1.pt",),
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_ends_the_run_with_its_cause_and_keeps_what_is_good(shards, tmp_path, monkeypatch, name):
    fault, folder = FAULTS[name], tmp_path / "run"
    argv = small_command(shards, tmp_path, "run", fault.loss, *fault.flags.replace("SHARDS", shards).split())
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        with monkeypatch.context() as patch, pytest.raises(fault.error, match=fault.said):
            fault.bring_in(patch)
            run(argv, fault.stop_after)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert folder.exists() == (fault.steps > 0)
    assert len(losses_of(folder)) == fault.steps
    assert not fault.logged or re.search(fault.logged, (folder / "out.log").read_text())
    assert {path.stem for path in folder.glob("checkpoints/*")} == {Path(name).stem for name in fault.saved}
    saved = [folder / "checkpoints" / name for name in fault.saved]
    for path in saved:
        state = torch.load(path, weights_only=True)["state_dict"]
        assert all(torch.isfinite(value).all() for value in state.values())
    if saved:
        assert run([*argv, "--resume", "latest"]) == 0
        assert [step for step, *_ in losses_of(folder)] == list(range(10))


# --- damaged checkpoints ----------------------------------------------------------------------------------------------


def embed(checkpoint: Path, shards: str, output: Path) -> None:
    model = ["--model", "small-vit", "--pretrained", str(checkpoint)]
    write_reference([shards, *model, "--output", str(output), "--workers", "0"])


def train_from(checkpoint: Path, shards: str, output: Path) -> None:
    run(small_command(shards, output, "run", "openclip", "--pretrained", str(checkpoint)))


USES = {
    "export": lambda checkpoint, shards, output: export(checkpoint, "safetensors", output),
    "evaluate": lambda checkpoint, shards, output: load_encoder(
        parse_args(["--checkpoint", str(checkpoint), "--data-dir", str(output)])
    ),
    "inspect": lambda checkpoint, shards, output: inspect(
        [str(checkpoint.parents[1]), "--checkpoint", checkpoint.name, "--output", str(output)]
    ),
    "embed": embed,
    "train": train_from,
}


@pytest.mark.parametrize("use", USES)
def test_a_corrupt_checkpoint_is_not_used(use, shards, whole, tmp_path):
    shutil.copytree(whole, tmp_path / "run")
    checkpoint = tmp_path / "run" / "checkpoints" / "epoch_2.pt"
    flip_a_bit(checkpoint)
    with pytest.raises(UsageError, match=r"epoch_2\.pt is corrupt"):
        USES[use](checkpoint, shards, tmp_path / "output")
    assert not (tmp_path / "output").exists()


def test_export_and_evaluation_of_a_run_use_its_newest_good_checkpoint(whole, tmp_path, caplog):
    folder = shutil.copytree(whole, tmp_path / "run")
    flip_a_bit(folder / "checkpoints" / "epoch_2.pt")
    loaded, _ = load_encoder(parse_args([str(folder), "--data-dir", str(tmp_path)]))
    assert Path(loaded.checkpoint).name == "epoch_1.pt"
    export(folder, "safetensors", tmp_path / "output")
    exported = load_file(tmp_path / "output" / "open_clip_model.safetensors")
    expected = torch.load(whole / "checkpoints" / "epoch_1.pt", weights_only=True)["state_dict"]
    assert all(torch.equal(exported[name], value) for name, value in expected.items())
    assert caplog.text.count("epoch_2.pt is corrupt") == 2


@pytest.mark.parametrize("log", LOGS)
def test_an_evaluation_that_only_one_log_has_is_repeated(shards, whole, tmp_path, log):
    """An evaluation writes one line to each log. After a kill, the line may be missing or truncated in one log."""
    shutil.copytree(whole, tmp_path / "run")
    lines = (tmp_path / "run" / log).read_text()
    (tmp_path / "run" / log).write_text(lines[:-9])
    assert run(small_command(shards, tmp_path, "run", "fastclip", "--val-data", shards, "--resume", "latest")) == 0
    for each in LOGS:
        assert lines_of(tmp_path / "run" / each) == lines_of(whole / each)


def test_a_run_is_left_alone_that_exists_or_of_which_no_checkpoint_can_be_read(shards, whole, tmp_path):
    """Otherwise a new run could report an older run's checkpoint as its own."""
    shutil.copytree(whole, tmp_path / "run")
    checkpoints = tmp_path / "run" / "checkpoints"

    def assert_is_refused(message, name, *more):
        before = contents(tmp_path)
        with pytest.raises(UsageError, match=message):
            run(small_command(shards, tmp_path, name, "fastclip", *more))
        after = contents(tmp_path)
        before["run/out.log"] = after["run/out.log"]
        assert after == before

    assert_is_refused("exists; continue it with --resume latest", "run")
    flip_a_bit(checkpoints / "epoch_2.pt")
    by_path = ("--resume", str(checkpoints / "epoch_2.pt"))
    assert_is_refused(r"epoch_2\.pt is corrupt.*epoch_1\.pt is good", "other", *by_path)
    flip_a_bit(checkpoints / "epoch_1.pt")
    assert_is_refused(r"none of the checkpoints in .* can be read", "run", "--resume", "latest")


def test_two_ranks_end_together_where_the_checkpoints_are_out_of_reach(shards, tmp_path):
    argv = [*small_command(shards, tmp_path, "run", "fastclip", "--save-every-steps", "2"), "--batch-size", "8"]
    messages = two_ranks().run(run_that_loses_its_checkpoints, argv, group=False, timeout=200)
    assert all("epoch_2.pt could not be saved: rank 0: " in message for message in messages)
    assert "epoch_0_step_4.pt could not be saved" in (tmp_path / "run" / "out.log").read_text()
    assert len(losses_of(tmp_path / "run")) == 10


def run_that_loses_its_checkpoints(argv: list[str]) -> str:
    """Train, and deny rank 0 access to checkpoints/ from the third step on. Return the run's error message."""

    def denied(original):
        def call(path, *args, **options):
            if "checkpoints" in path.parts and distributed.is_rank0():
                raise PermissionError(13, "Permission denied", str(path))
            return original(path, *args, **options)

        return call

    def step(self, batches, number=0, take=TrainStep.__call__):
        for name in ("is_file", "mkdir", "exists") if number == 2 else ():
            patched.setattr(Path, name, denied(getattr(Path, name)))
        return take(self, batches, number)

    with pytest.MonkeyPatch.context() as patched, pytest.raises(SaveFailed) as failed:
        patched.setattr(TrainStep, "__call__", step)
        run(argv)
    return str(failed.value)


def test_a_stop_before_the_first_step_saves_nothing(shards, tmp_path, monkeypatch):
    class Stopped(trainer.SignalRequests):
        def __enter__(self):
            super().__enter__()
            signal.raise_signal(signal.SIGTERM)
            return self

    monkeypatch.setattr(trainer, "SignalRequests", Stopped)
    with pytest.raises(SystemExit) as stopped:
        main(small_command(shards, tmp_path, "run", "openclip"))
    assert stopped.value.code == EXIT_AFTER_SIGTERM and not (tmp_path / "run").exists()


def test_a_run_whose_checkpoints_are_gone_keeps_its_log(shards, tmp_path):
    """For example, the disk of checkpoints/ may not be mounted."""
    argv = small_command(shards, tmp_path, "run", "openclip", "--resume", "latest")
    assert run(argv, stop_after=3) == EXIT_AFTER_SIGTERM
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    with pytest.raises(
        UsageError, match=r"log of 3 steps, and its checkpoints are lost.* disk of .*/checkpoints is mounted"
    ):
        run(argv)
    assert len(losses_of(tmp_path / "run")) == 3


# --- two programs, one folder -----------------------------------------------------------------------------------------


def test_a_refused_resume_leaves_the_run_folder_as_it_was(shards, tmp_path, monkeypatch):
    """A mid-epoch resume with other data is rejected; config.json must still describe the data of the first launch.

    Also, a full disk changes no file.
    """
    argv = small_command(shards, tmp_path, "run", "openclip", "--resume", "latest")
    assert run(argv, stop_after=3) == signals.EXIT_AFTER_SIGTERM
    files = [tmp_path / "run" / name for name in ("config.json", "params.txt", "metrics.jsonl")]
    before = [file.read_bytes() for file in files]
    fewer = tmp_path / "fewer.json"
    Manifest.load(Path(shards).parent / "manifest.json").without({5}).save(fewer)
    with pytest.raises(ValueError, match=r"cannot resume mid-epoch: .* new --name"):
        run([*argv, "--manifest", str(fewer)])
    assert [file.read_bytes() for file in files] == before
    monkeypatch.setattr(os, "fsync", disk_is_full)
    with pytest.raises(UsageError, match=r"cannot write to the run folder .*/run \(.*No space left.*: free disk space"):
        run([*argv, "--epochs", "3"])
    assert [file.read_bytes() for file in files] == before


def test_a_second_run_in_the_same_folder_is_refused(shards, tmp_path, monkeypatch):
    monkeypatch.setattr(run_folder, "LOCK_PATIENCE", 0.1)
    argv = small_command(shards, tmp_path, "run", "openclip", "--epochs", "200", "--resume", "latest")
    program = Program(argv, 1, tmp_path / "output")
    try:
        program.wait_for_step(tmp_path / "run", 2)
        with pytest.raises(UsageError, match=rf"is in use by process {program.trainers()[0]} on "):
            run(argv)
    finally:
        program.kill()
    steps = [step for step, *_ in losses_of(tmp_path / "run")]
    assert steps == list(range(len(steps)))
    assert run([*argv, "--epochs", "1"]) == 0  # the killed process no longer holds the lock


def test_a_run_that_another_start_trained_meanwhile_is_left_alone(tmp_path, monkeypatch):
    """The second of two simultaneous starts waits for the lock, and may get it only when the first run is complete."""
    acquire = FileLock.acquire

    def wait_for_the_other_run(lock, **options):
        (tmp_path / "run" / "metrics.jsonl").write_text("{}\n")
        return acquire(lock, **options)

    monkeypatch.setattr(FileLock, "acquire", wait_for_the_other_run)
    with pytest.raises(UsageError, match="exists; continue it"), run_folder.opened(RunFolderConfig(tmp_path, "run")):
        pass
    assert (tmp_path / "run" / "metrics.jsonl").exists()


def test_trainers_end_with_torchrun(shards, tmp_path):
    argv = [*command(shards, tmp_path, "run", "openclip", "--epochs", "200", "--resume", "latest"), "--batch-size", "8"]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    with subprocess.Popen([*torchrun, "-m", "openclip_ext.training.main", "--", *argv]) as launcher:
        try:
            wait_until(lambda: launcher.poll() is not None or len(lines_of(tmp_path / "run" / "metrics.jsonl")) >= 3)
            trainers = children_of(launcher.pid)
        finally:
            launcher.kill()
    assert len(trainers) == 2
    wait_until(lambda: not any(is_alive(pid) for pid in trainers), 60)
    steps = [step for step, *_ in losses_of(tmp_path / "run")]
    assert run([*argv, "--batch-size", "16"], stop_after=2) == EXIT_AFTER_SIGTERM
    assert [step for step, *_ in losses_of(tmp_path / "run")] == list(range(len(steps) + 2))  # each step is logged once


# --- signals and ranks that stop --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("sent", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 143)])
def test_ctrl_c_saves_like_sigterm(shards, tmp_path, sent, status):
    if sent == signal.SIGHUP and signal.getsignal(sent) == signal.SIG_IGN:
        pytest.skip("under nohup, the tests and their child processes ignore SIGHUP")
    argv = small_command(shards, tmp_path, "run", "fastclip", "--workers", "2", "--epochs", "200", "--resume", "latest")
    program = Program(argv, 1, tmp_path / "output")
    program.wait_for_step(tmp_path / "run", 2)
    os.kill(program.trainers()[0], sent)
    assert program.wait() == [status]
    done = len(losses_of(tmp_path / "run"))
    (path,) = (tmp_path / "run" / "checkpoints").glob("*_step_*.pt")
    assert path.stem.endswith(f"_step_{done}")


@pytest.mark.parametrize("by_torchrun", [False, True])
def test_a_second_ctrl_c_ends_at_once_unless_torchrun_may_have_handed_it_on(by_torchrun, monkeypatch):
    if by_torchrun:
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    with signals.SignalRequests() as requests:
        signal.raise_signal(signal.SIGINT)
        with contextlib.nullcontext() if by_torchrun else pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGUSR1)  # does not replace the stop
        assert requests.poll_ranks() == signals.Request.SAVE_AND_STOP


def test_signals_are_handled_only_during_training_and_nohup_stays():
    before = signal.getsignal(signal.SIGTERM), signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with signals.SignalRequests():
            assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
        assert signal.getsignal(signal.SIGTERM) == before[0]
    finally:
        signal.signal(signal.SIGHUP, before[1])


def test_a_signal_that_comes_while_the_ranks_agree_is_for_the_next_step(monkeypatch):
    """The ranks may wait for each other in this collective. A signal that arrives during the wait must not be lost."""

    def signalled(flag):
        signal.raise_signal(signal.SIGTERM)
        return lambda: flag

    with signals.SignalRequests() as requests:
        with monkeypatch.context() as patched:
            patched.setattr(signals.distributed, "any_rank_soon", signalled)
            assert requests.poll_ranks() == signals.Request.NOTHING
        assert requests.poll_ranks() == signals.Request.SAVE_AND_STOP
        assert requests.poll_ranks() == signals.Request.NOTHING


@pytest.mark.parametrize("rank", [0, 1])
def test_a_stopped_rank_is_named(two_trainers, rank):
    """Without torchrun, rank 0 also has the store of the heartbeats, which then no longer answers."""
    trainers = two_trainers.trainers()
    os.kill(trainers[rank], signal.SIGSTOP)
    wait_until(lambda: not is_alive(trainers[1 - rank]), 120)
    assert f"No heartbeat for 10 s from rank {rank} (process {trainers[rank]} on " in two_trainers.text()


def beat_out_of_step() -> bool:
    heartbeat.INTERVAL = patience = 1.5 + 0.6 * distributed.rank()
    with heartbeat.watched(patience):
        time.sleep(4)
    return True


def test_a_short_timeout_does_not_end_healthy_ranks():
    assert two_ranks().run(beat_out_of_step) == [True, True]


def test_the_rank_that_outlives_another_says_so_in_one_line(two_trainers):
    os.kill(two_trainers.trainers()[1], signal.SIGKILL)
    wait_until(lambda: None not in two_trainers.statuses(), 120)
    assert two_trainers.statuses() == [1, -signal.SIGKILL]
    assert "Waiting for 2 processes to connect to 127.0.0.1" in two_trainers.text()
    assert "error: another rank failed; see its error. --resume latest continues" in two_trainers.text()
    assert "Traceback" not in two_trainers.text()


# --- ranks, workers and scripts ---------------------------------------------------------------------------------------


def test_workers_that_a_fork_server_made_end_with_the_training_process(tmp_path: Path):
    """The parent of such a worker is the fork server, not the trainer. Python 3.14 starts workers this way by default."""
    data, (receiver, sender) = write_shards(tmp_path, [40])[0], multiprocessing.Pipe()
    # A spawned process gets its own fork server; a fork would share the server that another test started.
    trainer = multiprocessing.get_context("spawn").Process(target=train_with_a_fork_server, args=(data, sender))
    trainer.start()
    sender.close()  # otherwise recv() would wait forever if the trainer fails
    workers = receiver.recv()
    assert all(map(is_alive, workers))
    trainer.kill()
    wait_until(lambda: not any(map(is_alive, workers)), 60)


def test_a_run_that_was_stopped_for_a_while_does_not_end_its_worker(tmp_path: Path):
    def slow(image):
        time.sleep(2.0 if next(counter) == 12 else 0.0)
        return preprocess(image)

    def train() -> None:
        for number, _ in enumerate(build(data, workers=1, preprocess=slow, patience=4.0).iterate(0)):
            sender.send(number)

    counter = iter(range(1000))
    data, (receiver, sender) = write_shards(tmp_path, [40])[0], multiprocessing.Pipe()
    trainer = multiprocessing.get_context("fork").Process(target=train)
    trainer.start()
    sender.close()
    while receiver.recv() < 2:
        pass
    os.kill(trainer.pid, signal.SIGSTOP)
    time.sleep(6)
    os.kill(trainer.pid, signal.SIGCONT)
    trainer.join()
    assert trainer.exitcode == 0


def lose_the_end(data: str) -> list[list[int]]:
    loader = build(data, rank=None, world_size=None, max_bad_fraction=0.5)
    return distributed.all_gather_object(indices(list(loader.iterate(0))))


def test_all_ranks_have_all_steps_where_one_loses_the_end_of_an_epoch(tmp_path: Path):
    """The lost samples are replaced by samples of the next lane, which is the other rank's."""
    (good,) = write_shards(tmp_path / "good", [160])
    lost = set(two_ranks().run(lose_the_end, good)[0][1][36:])
    (bad,) = write_shards(tmp_path / "bad", [160], {number: undecodable(number) for number in lost})
    first, second = two_ranks().run(lose_the_end, bad)[0]
    assert len(first) == len(second) == 80 and {*first, *second} == {*range(160)} - lost


GUARD = 'if __name__ == "__main__": '


def train_with_other_flags(argv: list[str], own: list[list[str]]) -> str:
    with pytest.raises(UsageError) as refused:
        run([*argv, *own[int(os.environ["RANK"])]])
    return str(refused.value)


@pytest.mark.parametrize(
    ("own", "said"),
    [
        ([[], ["--resume", "/a/epoch_1.pt"]], "resume PATH (None)"),
        ([["--model", "ViT-B/32"], ["--model", "ViT-L/14"]], "model ViT-L/14 (ViT-B/32)"),
        ([["--opt", "timm/lion", "--lr", "1"], ["--opt", "timm/sgd", "--lr", "1"]], "opt timm/sgd (timm/lion)"),
    ],
)
def test_ranks_with_other_flags_are_named(tmp_path: Path, own: list[list[str]], said: str):
    argv = command(write_shards(tmp_path, [40])[0], tmp_path, "run", "openclip", "--rank-patience", "60")
    first, second = two_ranks().run(train_with_other_flags, argv, own, group=False)
    assert first == second == f"give rank 1 the flags of rank 0 (in parentheses): {said}"


def test_a_port_in_use_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        ranks = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1"}
        for name, value in (ranks | {"MASTER_PORT": other.getsockname()[1]}).items():
            monkeypatch.setenv(name, str(value))
        with pytest.raises(UsageError, match="MASTER_PORT"):
            run(command("none.tar", tmp_path, "run", "openclip"))


def test_a_run_in_a_thread_trains_without_signal_handlers(
    shards: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    handler = signal.getsignal(signal.SIGTERM)
    with ThreadPoolExecutor(1) as thread:
        argv = small_command(shards, tmp_path, "run", "openclip", "--epochs", "1", "--workers", "1")
        assert thread.submit(run, argv).result() == 0
    assert (tmp_path / "run" / "checkpoints" / "epoch_1.pt").is_file()
    assert signal.getsignal(signal.SIGTERM) is handler and caplog.text.count("main thread") == 1


@pytest.mark.parametrize(("method", "guard", "is_refused"), [("forkserver", "", True), ("spawn", GUARD, False)])
def test_a_script_without_a_guard_is_refused_where_processes_do_not_fork(
    shards: str, tmp_path: Path, method: str, guard: str, is_refused: bool
):
    """Otherwise, a worker that fails in the import of the script never reads its data, and the run waits forever."""
    argv = [*command(shards, tmp_path, "run", "openclip", "--epochs", "1"), "--workers", "1"]
    script = tmp_path / "script.py"
    script.write_text(
        "import multiprocessing\nfrom openclip_ext.training.main import main\n"
        f"{guard}multiprocessing.set_start_method({method!r}, force=True), main({argv!r})\n"
    )
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=300)
    assert (done.returncode != 0) == is_refused, done.stderr[-2000:]
    assert (tmp_path / "run" / "checkpoints" / "epoch_1.pt").is_file() != is_refused
    assert (GUARD.strip() in done.stderr and "--workers 0" in done.stderr) == is_refused


def model_loss(outputs: object = None, saved: object = None) -> None:
    loss = ModelLoss(create_loss("queueclip", embed_dim=16, num_samples=40), tiny_model())
    loss(outputs) if outputs else loss.load_state_dict(saved)


@pytest.mark.parametrize(
    ("act", "said"),
    [
        (
            lambda f: (f / "config.json").write_text("[" * 99_999) and read_config(f),
            "is not a run's configuration: maximum",
        ),
        (
            lambda f: (f / "config.json").write_text('{"resolved": {"flags": 3}}') and read_config(f),
            "flags is '3', expected dict",
        ),
        (
            lambda f: (f / "out.log").mkdir() or run_folder.opened(RunFolderConfig(f.parent, f.name, True)).__enter__(),
            "--logs",
        ),
        (lambda f: run(command(os.fsdecode(b"/\xff"), f, "run", "openclip")), "udcff' is not UTF-8, .*: rename"),
        (lambda f: model_loss((torch.ones(2, 2),)), "the model returned tuple: expected .*output_dict=True"),
        (
            lambda f: model_loss(saved={"loss": {}, "tables": {}}),
            r"(?s)the saved loss has .* with different options .*Resume with",
        ),
    ],
)
def test_what_is_wrong_is_said(tmp_path: Path, act: Callable[[Path], object], said: str):
    with pytest.raises(ValueError, match=said):
        act(tmp_path)
