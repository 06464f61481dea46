"""Data workers that are killed, hang or run out of memory; captions that are too long for a tokenizer."""

import gc
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from open_clip import get_tokenizer

from openclip_ext.data.loader.workers import WorkerError
from tests.data.loading import build, indices, preprocess, tokenize
from tests.data.shards import sample_members, write_shards
from tests.training.programs import is_alive


@pytest.mark.parametrize("at", ["in an epoch", "between epochs"])
def test_a_worker_that_was_killed_ends_the_run_with_the_reason(tmp_path: Path, at: str):
    loader = build(write_shards(tmp_path, [100]), workers=2, patience=60)
    batches = loader.iterate(0)
    list(batches) if at == "between epochs" else next(batches)
    os.kill(loader._loader._iterator._workers[1].pid, signal.SIGKILL)
    with pytest.raises(WorkerError, match=r"was killed, probably because memory ran out; fewer --workers"):
        list(batches), list(loader.iterate(1))


def test_torchs_handler_of_the_end_of_a_worker_goes(tmp_path: Path):
    next(build(write_shards(tmp_path, [100]), workers=1).iterate(0))
    assert signal.getsignal(signal.SIGCHLD) == signal.SIG_DFL


@pytest.mark.parametrize(("batch", "patience", "seconds"), [(-1, 2.0, 2), (0, 0.5, 3)])
def test_a_worker_that_does_not_answer_is_named_and_ended(tmp_path: Path, batch: int, patience: float, seconds: int):
    """The timeout of the first batches is six times as long: 3 s with a patience of 0.5 s."""

    def hang(texts: list[str]) -> torch.Tensor:
        if place in tokenize(texts)[:, 0]:
            time.sleep(1000)
        return tokenize(texts)

    data = write_shards(tmp_path, [40])
    place = int(list(build(data, workers=1).iterate(0))[batch]["index"][-1])
    message = rf"data worker \(process (\d+)\) did not answer for {seconds} s \(--rank-patience\)"
    with pytest.raises(WorkerError, match=message) as ended:
        list(build(data, workers=1, tokenizer=hang, patience=patience).iterate(0))
    assert not is_alive(int(re.search(message, str(ended.value)).group(1)))


def test_the_workers_are_watched_by_one_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The number of threads does not depend on the number of batches."""
    loader = build(write_shards(tmp_path, [100]), workers=1, patience=60)
    assert len(list(loader.iterate(0))) == 25
    started = []
    start = threading.Thread.start
    monkeypatch.setattr(threading.Thread, "start", lambda thread: (started.append(thread), start(thread))[1])
    assert len(list(loader.iterate(1))) == 25
    assert len(started) <= 1


@pytest.mark.parametrize("at", ["in an epoch", "between epochs"])
def test_each_stopped_worker_ends_the_wait(tmp_path: Path, at: str):
    """A wait may be for the batch of another worker than the next one, and for all workers at the start of an epoch."""
    loader = build(write_shards(tmp_path, [100]), workers=2, patience=0.3)
    batches = loader.iterate(0)
    list(batches) if at == "between epochs" else [next(batches) for _ in range(3)]
    os.kill(loader._loader._iterator._workers[0].pid, signal.SIGSTOP)
    with pytest.raises(WorkerError, match="did not answer"):
        list(batches), list(loader.iterate(1))


_FAILING = """
import os, signal, sys
from tests.data.loading import build
loader = build(sys.argv[1:], workers=2)
for batch in loader.iterate(0):
    os.kill(loader._loader._iterator._workers[0].pid, signal.SIGSTOP)
    raise RuntimeError("out of memory")
"""


def test_a_stopped_worker_does_not_prevent_the_exit_after_another_error(tmp_path: Path):
    command = [sys.executable, "-c", _FAILING, *write_shards(tmp_path, [100])]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert "RuntimeError: out of memory" in ended.stderr


def test_full_shared_memory_is_said(tmp_path: Path):
    def full(image):
        raise RuntimeError("unable to allocate shared memory(shm) for file </torch_1>: No space left on device (28)")

    with pytest.raises(WorkerError, match=r"/dev/shm is too small.*docker: --shm-size.*--workers 0"):
        list(build(write_shards(tmp_path, [20]), preprocess=full, workers=1).iterate(0))


def test_workers_destroy_nothing_that_they_inherit(tmp_path: Path, request: pytest.FixtureRequest):
    """A destructor in a worker could hang: destroying a process group waits for threads that a fork does not copy."""
    destroyed = tmp_path / "destroyed"

    class Garbage:
        def __del__(self) -> None:
            destroyed.touch()

    data = write_shards(tmp_path, [20])
    batches = build(data, preprocess=lambda image: (gc.collect(), preprocess(image))[1], workers=1).iterate(0)
    gc.disable()  # in this process only, as training does
    request.addfinalizer(gc.enable)
    garbage = Garbage()
    garbage.itself = garbage
    del garbage
    assert list(batches)
    assert not destroyed.exists()
    gc.collect()
    assert destroyed.exists()


def test_a_megabyte_without_a_space_is_cut(tmp_path: Path):
    long = [(name, b"a" * 2**20 if name.endswith("txt") else data) for name, data in sample_members(5)]
    loader = build(write_shards(tmp_path, [8], {5: long}), tokenizer=get_tokenizer("ViT-B-32"))
    assert len(indices(list(loader.iterate(0)))) == 8
