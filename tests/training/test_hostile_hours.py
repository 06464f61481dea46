"""A run with a fault every few steps ends bitwise equal to an uninterrupted run. ``pytest FILE --soak 100`` takes hours.

Two ranks with two data workers each read shards from a local file server, and some steps are non-finite. Random faults are:
all processes, one rank or one data worker is killed; all ranks receive SIGTERM; the file server is unavailable, interrupts
transfers or stalls; the disk (a tmpfs that only root can mount) is full for some seconds; the clock jumps. When the program
exits, the test starts the same command again.
"""

import contextlib
import functools
import os
import random
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from openclip_ext.training.step import TrainStep
from tests.data.test_storage import Server
from tests.soak import SoakCase
from tests.training.programs import Program, children_of, differing, program, send_kill
from tests.training.runs import make_shards, small_command

RANKS, EPOCHS = 2, 30
FAULTS = ("kill all", "kill a rank", "kill a worker", "ask to end", "outage", "broken answers", "stall")
FAULTS += ("full disk", "clock")


def hostile_program(clock: Path, argv: list[str]) -> None:
    """Run the training program with clock jumps and non-finite steps."""
    real = time.time
    time.time = lambda: real() + float(clock.read_text() or 0)

    def step(self, batches, number=0, take=TrainStep.__call__):
        if number % 11 == 5:
            batches = [batch | {"image": torch.full_like(batch["image"].float(), torch.nan)} for batch in batches]
        return take(self, batches, number)

    TrainStep.__call__ = step
    program(argv)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """Yield a folder on a disk of 300 MiB, or an ordinary folder if this user may not mount disks."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=300m", "tmpfs", str(folder)]
    is_mounted = subprocess.run(mount, capture_output=True).returncode == 0
    yield folder
    if is_mounted:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def afflict(fault: str, running: Program, server: Server, disk: Path, rng: random.Random) -> None:
    """Cause one fault. Temporary faults end by themselves, here or in the server."""
    trainers = running.trainers()
    if fault == "kill all":
        running.kill()
    elif fault == "kill a rank" and trainers:
        send_kill(rng.choice(trainers))
    elif fault == "kill a worker" and trainers:
        if children := children_of(rng.choice(trainers)):
            send_kill(rng.choice(children))
    elif fault == "ask to end":
        for pid in trainers:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
    elif fault == "outage":
        server.away_until = time.monotonic() + rng.uniform(0, 5)
    elif fault == "broken answers":
        server.breaks += rng.randrange(1, 4)
    elif fault == "stall":
        server.stalls += 1
    elif fault == "full disk" and disk.is_mount():
        filler = disk / "filler"
        with contextlib.suppress(OSError), filler.open("wb") as file:
            while True:
                file.write(bytes(1 << 20))
        time.sleep(rng.uniform(0, 3))
        filler.unlink()
    elif fault == "clock":
        disk.with_name("clock").write_text(str(rng.uniform(-7200, 7200)))


def reaches_a_step(running: Program, more: int) -> bool:
    """Wait up to a minute until ``more`` further steps are logged; return False if the program exits first."""
    wanted, deadline = running.text().count(" | loss ") + more, time.monotonic() + 60
    while not running.has_ended():
        if running.text().count(" | loss ") >= wanted or time.monotonic() > deadline:
            return True
        time.sleep(0.02)
    return False


@pytest.mark.soak(0)
def test_a_training_with_faults_is_the_undisturbed_one(
    soak_case: SoakCase, tmp_path: Path, disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = soak_case.random()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "clock").write_text("0")
    target = functools.partial(hostile_program, tmp_path / "clock")
    shards = Path(make_shards(tmp_path / "data"))
    loss = rng.choice(("fastclip", "neuclip", "queueclip", "amorlip", "isogclr"))
    more = f"--batch-size 8 --workers 2 --epochs {EPOCHS} --rank-patience 60 --save-every-steps 3".split()
    more += ["--save-frequency", "10", "--resume", "latest", "--max-skipped-steps", "9999"]
    if rng.random() < 0.5:
        more += ["--cache-dir", str(tmp_path / "copies")]
    happened: list[str] = []
    with Server(tmp_path) as server:
        url = f"{server.url}/data/{shards.name}"
        (tmp_path / "whole").mkdir()
        undisturbed = small_command(url, tmp_path / "whole", "run", loss, *more)
        whole = Program(undisturbed, RANKS, tmp_path / "output", target=target)
        assert not any(whole.wait()), whole.text()[-3000:]
        argv, statuses = small_command(url, disk / "logs", "run", loss, *more), [1]
        for start in range(200):
            running = Program(argv, RANKS, tmp_path / f"output_{start}", target=target)
            while reaches_a_step(running, 0 if rng.random() < 0.1 else rng.randrange(1, 20)):
                time.sleep(rng.uniform(0, 1))
                happened.append(rng.choice(FAULTS))
                afflict(happened[-1], running, server, disk, rng)
            statuses = running.wait()
            if not any(statuses):
                break
        server.shutdown()
    assert not any(statuses), (happened, running.text()[-3000:])
    assert differing(disk / "logs" / "run", tmp_path / "whole" / "run") == [], happened
    print(f"{loss}: {len(happened)} faults, {start + 1} starts")
