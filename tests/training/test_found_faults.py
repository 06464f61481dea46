"""Regression tests for faults that earlier stress tests found."""

import json
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from openclip_ext import create_loss, distributed
from openclip_ext.cli.errors import UsageError
from openclip_ext.evaluation.run_folder import read_config
from openclip_ext.integrations.model_loss import ModelLoss
from openclip_ext.training.checkpoint import saving
from openclip_ext.training.config import ReportingConfig, RunFolderConfig
from openclip_ext.training.runtime.reporting import Reporter
from openclip_ext.training.runtime.run_folder import opened
from tests.data.loading import build, indices, preprocess, train_with_a_fork_server
from tests.data.shards import undecodable, write_shards
from tests.distributed.pool import two_ranks
from tests.training.programs import is_alive, wait_until
from tests.training.runs import command, run, small_command
from tests.training.tiny import tiny_model


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
        ([["--workers", "1"], ["--workers", "2"]], "workers 2 (1)"),
        ([["--resume", "latest"], []], "resume None (latest)"),
        ([[], ["--resume", "/a/epoch_1.pt"]], "resume PATH (None)"),
        ([["--model", "ViT-B/32"], ["--model", "ViT-L/14"]], "model ViT-L/14 (ViT-B/32)"),
        ([["--opt", "timm/lion", "--lr", "1"], ["--opt", "timm/sgd", "--lr", "1"]], "opt timm/sgd (timm/lion)"),
    ],
)
def test_ranks_with_other_flags_are_named(tmp_path: Path, own: list[list[str]], said: str):
    argv = command(write_shards(tmp_path, [40])[0], tmp_path, "run", "openclip", "--rank-patience", "60")
    first, second = two_ranks().run(train_with_other_flags, argv, own, group=False)
    assert first == second == f"rank 1 must have the flags of rank 0 (in parentheses): {said}"


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


@pytest.mark.parametrize(
    ("method", "guard", "is_refused"), [("spawn", "", True), ("forkserver", "", True), ("spawn", GUARD, False)]
)
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


def train_on_csv(folder: Path, content: bytes) -> None:
    (folder / "pairs.csv").write_bytes(content)
    run(command(str(folder / "pairs.csv"), folder, "run", "openclip"))


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
        (lambda f: (f / "out.log").mkdir() or opened(RunFolderConfig(f.parent, f.name, True)).__enter__(), "--logs"),
        (lambda f: run(command(os.fsdecode(b"/\xff"), f, "run", "openclip")), "udcff' is not UTF-8, .*: rename"),
        (lambda f: train_on_csv(f, "filepath\ttitle\n0.png\tcafé".encode("latin-1")), r"pairs\.csv is not UTF-8 text"),
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


def test_lines_that_could_not_be_written_come_with_the_next(tmp_path: Path):
    reporter = Reporter(tmp_path, ReportingConfig(), 0, 10, 5)
    reporter.evaluation({"a": 1.0}, {"step": 4, "epoch": 1})
    (tmp_path / "checkpoints").mkdir()
    reporter.evaluation({"a": 2.0}, {"step": 9, "epoch": 2})
    lines = (tmp_path / "checkpoints" / "results.jsonl").read_text().splitlines()
    assert [json.loads(line)["epoch"] for line in lines] == [1, 2]


def test_each_step_is_saved_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """With --save-every-steps 5, a step at the end of an epoch is saved as this epoch, or mid-epoch if no epoch is saved."""
    saved = []
    save = saving.save
    monkeypatch.setattr(saving, "save", lambda folder, name, *rest: saved.append(name) or save(folder, name, *rest))
    argv = small_command(write_shards(tmp_path, [84])[0], tmp_path, "run", "openclip", "--epochs", "3")
    assert run([*argv, "--save-every-steps", "5", "--save-frequency", "2"]) == 0
    assert saved == ["epoch_0_step_5", "epoch_2", "epoch_3"]
