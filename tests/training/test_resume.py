"""A resumed run equals the uninterrupted run bit for bit: with every loss, with workers, and on two ranks."""

import signal
from pathlib import Path

import pytest
import torch

from openclip_ext.data.shards.tar import TarArchive
from openclip_ext.data.sources.source import BadDataError
from openclip_ext.evaluation.training_log import read_log
from openclip_ext.training.validation import Validation
from tests.training.programs import LOGS, lines_of
from tests.training.runs import (
    EXIT_AFTER_SIGTERM,
    LOSS_FLAGS,
    SAMPLES_PER_SHARD,
    assert_same_run,
    losses_of,
    make_shards,
    metrics_of,
    run,
    run_on_two_ranks,
    small_command,
    train,
)

# Steps after which a run of 2 epochs of 5 steps stops: in the first epoch, and in the second.
EARLY, LATE = 3, 8
TWO_WORKERS = ("--workers", "2")
FEW_BAD = ("--max-bad-fraction", "0.1")
# Losses with different kinds of state resume on two ranks, all others on one.
ON_TWO_RANKS = ("amorlip", "fastclip-v2", "neuclip")  # networks, temperatures of samples, prototypes


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Return a function that returns the folder of an uninterrupted run on one rank. Each run is made once."""
    folder, made = tmp_path_factory.mktemp("whole"), {}

    def make(shards: str, *of_run: str) -> Path:
        if (shards, of_run) not in made:
            made[shards, of_run] = train(shards, folder, f"run_{len(made)}", *of_run)
        return made[shards, of_run]

    return make


@pytest.mark.parametrize("loss", [loss for loss in LOSS_FLAGS if loss not in ON_TWO_RANKS])
def test_one_rank(whole, shards, tmp_path, loss):
    """The run stops in the first epoch. In the tests with two ranks, it stops in the second epoch."""
    assert_same_run(train(shards, tmp_path, "resumed", loss, stops=(EARLY,)), whole(shards, loss))


@pytest.mark.parametrize("loss", ["fastclip", "simclr", "cliplite"])
def test_workers(whole, shards, tmp_path, loss):
    """The losses need different data: indices (fastclip), two views (simclr) and flips (cliplite)."""
    resumed = train(shards, tmp_path, "resumed", loss, *TWO_WORKERS, stops=(LATE,))
    assert_same_run(resumed, whole(shards, loss, *TWO_WORKERS))


def test_a_shorter_epoch_after_a_resume_keeps_the_steps_and_the_schedule(shards, tmp_path, caplog):
    argv = small_command(shards, tmp_path, "run", "openclip", "--batch-size", "2", "--resume", "latest")
    assert run(argv, stop_after=36) == EXIT_AFTER_SIGTERM
    with caplog.at_level("INFO"):
        assert run([*argv, "--train-num-samples", "40"]) == 0  # 20 steps per epoch
    assert "Nothing is left" not in caplog.text and "step 56/56" in caplog.text
    rates = [line["lr"] for line in metrics_of(tmp_path / "run") if "loss" in line]
    assert rates[36:] == sorted(rates[36:], reverse=True)


def test_a_run_that_stops_after_its_last_step(whole, shards, tmp_path):
    """The resumed run takes no further step, and must save the learning rates of the last step."""
    assert_same_run(train(shards, tmp_path, "resumed", "fastclip", stops=(10,)), whole(shards, "fastclip"))


@pytest.fixture(scope="module")
def damaged_shards(tmp_path_factory):
    """Return the pattern of shards in which 5 of 84 images cannot be decoded."""
    folder = tmp_path_factory.mktemp("damaged")
    shards = make_shards(folder)
    for number in (3, 10, 30, 31, 70):
        with open(folder / f"{number // SAMPLES_PER_SHARD:05d}.tar", "r+b") as file:
            sample = list(TarArchive(file).samples(frozenset()))[number % SAMPLES_PER_SHARD]
            image = sample.members[[field in ("jpg", "png") for field in sample.found].index(True)]
            file.seek(image.data)
            file.write(b"x" * image.size)
    return shards


def assert_bad_samples_are_counted(folder):
    """Check the steps and the counts: each epoch has 5 steps of 16, unless the 79 good samples are known, which fill 4."""
    lines = metrics_of(folder)
    steps = [[line["step"] for line in lines if "loss" in line and line["epoch"] == epoch] for epoch in (0, 1)]
    (first, met), (last, known) = [(line["step"], line["bad_samples"]) for line in lines if "loss" not in line]
    assert (first, last, known) == (steps[0][-1], steps[1][-1], 5) and met in (4, 5)
    assert [len(steps[0]), len(steps[1])] == [5, (84 - met) // 16]
    assert all(line["bad_samples"] in (met, 5) for line in lines if line["epoch"] == 1)
    log = (folder / "out.log").read_text()
    assert f"Epoch 0 found {met} bad samples" in log and "| bad samples 5" in log


def test_bad_samples_on_one_rank(whole, damaged_shards, tmp_path):
    expected = whole(damaged_shards, "fastclip", *FEW_BAD)
    assert_same_run(train(damaged_shards, tmp_path, "resumed", "fastclip", *FEW_BAD, stops=(2, 1, 2, 2)), expected)
    assert_bad_samples_are_counted(expected)
    # The log says where an epoch has ended, although known bad samples may have shortened it, so its end is not logged.
    sparse = train(damaged_shards, tmp_path, "sparse", "fastclip", *FEW_BAD, "--log-every-n-steps", "100")
    last = read_log(sparse).steps[-1]
    assert (last["step"], last["bad_samples"]) == (metrics_of(expected)[-1]["step"], 5)
    assert last["samples"] == 16 * (last["step"] + 1)


def test_a_resume_goes_on_counting_bad_samples(damaged_shards, tmp_path):
    """If each resume counted from 0, no launch would reach the limit."""
    argv = small_command(
        damaged_shards, tmp_path, "run", "fastclip", "--max-bad-fraction", "0.04", "--resume", "latest"
    )
    with pytest.raises(BadDataError, match="4 bad samples in this epoch of 84"):
        for _ in range(5):
            run(argv, stop_after=1)


def test_a_run_with_too_many_bad_samples_is_saved_before_it_ends(whole, damaged_shards, tmp_path):
    argv = small_command(damaged_shards, tmp_path, "run", "fastclip", "--resume", "latest")
    with pytest.raises(BadDataError, match="4 bad samples in this epoch of 84"):
        run([*argv, "--max-bad-fraction", "0.04"])
    assert [path.name for path in (tmp_path / "run" / "checkpoints").glob("epoch_0_step_*.pt")]
    assert run([*argv, *FEW_BAD]) == 0
    assert_same_run(tmp_path / "run", whole(damaged_shards, "fastclip", *FEW_BAD))


@pytest.mark.parametrize("every_steps", ["0", "4"])
def test_a_run_that_stops_in_an_evaluation_logs_nothing_twice(
    whole, shards, damaged_shards, tmp_path, monkeypatch, every_steps
):
    """The save after the last step of the epoch was before the end of the epoch, so the resumed run ends it again."""

    def evaluate(self, encoder, validate=Validation.score):
        signal.raise_signal(signal.SIGTERM)
        torch.rand(1)  # must not change the training
        return validate(self, encoder)

    more = (*FEW_BAD, "--val-data", shards, "--save-frequency", "2", "--save-every-steps", every_steps)
    argv = small_command(damaged_shards, tmp_path, "run", "fastclip", *more, "--resume", "latest")
    with monkeypatch.context() as patched:
        patched.setattr(Validation, "score", evaluate)
        assert run(argv) == EXIT_AFTER_SIGTERM
    assert run(argv) == 0
    expected = whole(damaged_shards, "fastclip", *more)
    assert_same_run(tmp_path / "run", expected)
    assert [lines_of(tmp_path / "run" / log) for log in LOGS] == [lines_of(expected / log) for log in LOGS]


@pytest.fixture(scope="module")
def two_rank_runs(shards, damaged_shards, tmp_path_factory):
    folder = tmp_path_factory.mktemp("two_ranks")

    def make(name, loss, stops, *more, shards=shards):
        argv = small_command(shards, folder, name, loss, "--batch-size", "8", "--resume", "latest", *more)
        for stop in (*stops, None):
            run_on_two_ranks(argv, stop)

    for loss in ON_TWO_RANKS:
        make(f"{loss}-whole", loss, ())
        make(f"{loss}-resumed", loss, (LATE,))
    for loss in ("fastclip", "neuclip"):
        argv = small_command(shards, folder, f"{loss}-from-one", loss, "--resume", "latest")
        assert run(argv, stop_after=EARLY) == EXIT_AFTER_SIGTERM
        make(f"{loss}-from-one", loss, ())
    for name, stops in (("bad-whole", ()), ("bad-resumed", (4,))):
        make(name, "fastclip", stops, *TWO_WORKERS, *FEW_BAD, shards=damaged_shards)
    return folder


def test_bad_samples_on_two_ranks(two_rank_runs):
    assert_same_run(two_rank_runs / "bad-resumed", two_rank_runs / "bad-whole")
    assert_bad_samples_are_counted(two_rank_runs / "bad-whole")


@pytest.mark.parametrize("name", ON_TWO_RANKS)
def test_two_ranks(two_rank_runs, name):
    assert_same_run(two_rank_runs / f"{name}-resumed", two_rank_runs / f"{name}-whole")


@pytest.mark.parametrize("loss", ["fastclip", "neuclip"])
def test_two_ranks_go_on_where_one_stopped(two_rank_runs, loss):
    """Two ranks resume the run of one rank mid-epoch, at the first unseen sample, and shard the per-sample state."""
    folder = two_rank_runs / f"{loss}-from-one"
    assert [step for step, *_ in losses_of(folder)] == list(range(10))
    state = torch.load(folder / "checkpoints" / "epoch_2.state" / "step_10" / "shared.pt", weights_only=True)
    assert state["world_size"] == 2
