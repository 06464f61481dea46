"""A resumed run is the uninterrupted one, bit for bit: every loss, 0 and 2 workers, 1 and 2 ranks."""

import pytest
import torch

from openclip_ext.data.source import BadDataError
from openclip_ext.data.tar import TarArchive
from tests.training.runs import (
    EXIT_AFTER_SIGTERM,
    LOSS_FLAGS,
    SAMPLES_PER_SHARD,
    assert_same_run,
    command,
    losses_of,
    make_shards,
    metrics_of,
    run,
    run_on_two_ranks,
)

# A loss and its loader's workers: every loss without; with workers what differs in the samples (pairs, their index, two
# views, captions that follow the flip).
CASES = [(loss, "0") for loss in LOSS_FLAGS] + [(loss, "2") for loss in ("openclip", "fastclip", "simclr", "cliplite")]
STOP_IN_EPOCH = {0: 3, 1: 8}  # optimizer steps into a run of 2 x 5


@pytest.mark.parametrize(("loss", "workers"), CASES)
def test_one_rank(shards, tmp_path, loss, workers):
    more = ["--workers", workers]
    assert run(command(shards, tmp_path, "whole", loss, *more)) == 0
    resumed = command(shards, tmp_path, "resumed", loss, *more, "--resume", "latest")
    for stop in (STOP_IN_EPOCH[0], STOP_IN_EPOCH[1] - STOP_IN_EPOCH[0]):
        assert run(resumed, stop_after=stop) == EXIT_AFTER_SIGTERM
    assert run(resumed) == 0
    assert_same_run(tmp_path / "resumed", tmp_path / "whole")


def test_a_run_that_stops_after_its_last_step(shards, tmp_path):
    """It saves without another step, and with the last one's learning rates."""
    assert run(command(shards, tmp_path, "whole", "fastclip")) == 0
    resumed = command(shards, tmp_path, "resumed", "fastclip", "--resume", "latest")
    assert run(resumed, stop_after=10) == EXIT_AFTER_SIGTERM
    assert run(resumed) == 0
    assert_same_run(tmp_path / "resumed", tmp_path / "whole")


@pytest.fixture(scope="module")
def damaged_shards(tmp_path_factory):
    """Shards in which 5 of 84 images do not decode."""
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
    """The second epoch goes without those of the first; no epoch has the 80 good samples that 5 steps take.

    With workers, what is left over in the first is laid out anew, and may have a bad sample again: it ends a step earlier.
    """
    lines = metrics_of(folder)
    steps = [[line["step"] for line in lines if "loss" in line and line["epoch"] == epoch] for epoch in (0, 1)]
    assert len(steps[0]) in (3, 4) and len(steps[1]) == 4
    (first, met), (last, known) = [(line["step"], line["bad_samples"]) for line in lines if "loss" not in line]
    assert (first, last, known) == (steps[0][-1], steps[1][-1], 5) and met in (4, 5)
    assert all(line["bad_samples"] in (met, 5) for line in lines if line["epoch"] == 1)
    log = (folder / "out.log").read_text()
    assert f"Epoch 0 met {met} bad samples" in log and "| bad samples 5" in log


@pytest.mark.parametrize("workers", ["0", "2"])
def test_bad_samples_on_one_rank(damaged_shards, tmp_path, workers):
    more = ["--workers", workers, "--max-bad-fraction", "0.1"]
    assert run(command(damaged_shards, tmp_path, "whole", "fastclip", *more)) == 0
    resumed = command(damaged_shards, tmp_path, "resumed", "fastclip", *more, "--resume", "latest")
    for stop in (2, 1, 2, 2):
        assert run(resumed, stop_after=stop) == EXIT_AFTER_SIGTERM
    assert run(resumed) == 0
    assert_same_run(tmp_path / "resumed", tmp_path / "whole")
    assert_bad_samples_are_counted(tmp_path / "whole")


def test_a_resume_goes_on_counting_bad_samples(damaged_shards, tmp_path):
    """One that begins anew would not come above the limit."""
    argv = command(damaged_shards, tmp_path, "run", "fastclip", "--max-bad-fraction", "0.05", "--resume", "latest")
    with pytest.raises(BadDataError, match="5 bad samples in this epoch of 84"):
        for _ in range(5):
            run(argv, stop_after=1)


def test_a_run_with_too_many_bad_samples_is_saved_before_it_ends(damaged_shards, tmp_path):
    assert run(command(damaged_shards, tmp_path, "whole", "fastclip", "--max-bad-fraction", "0.1")) == 0
    argv = command(damaged_shards, tmp_path, "run", "fastclip", "--resume", "latest", "--max-bad-fraction")
    with pytest.raises(BadDataError, match="5 bad samples in this epoch of 84"):
        run([*argv, "0.05"])
    assert [path.name for path in (tmp_path / "run" / "checkpoints").glob("epoch_0_step_*.pt")]
    assert run([*argv, "0.1"]) == 0
    assert_same_run(tmp_path / "run", tmp_path / "whole")


HOST_TABLES = ["fastclip", "fastclip-v2"]


@pytest.mark.parametrize("loss", HOST_TABLES)
def test_tables_on_the_host_are_the_same_run(shards, tmp_path, loss):
    """In a file and resumed in memory, against a table with the model and no interruption; with workers that fork."""
    assert run(command(shards, tmp_path, "whole", loss, "--workers", "2")) == 0
    resumed = command(shards, tmp_path, "resumed", loss, "--workers", "2", "--resume", "latest")
    in_file = [*resumed, "--state-dir", str(tmp_path)]
    in_memory = [*resumed, "--state-device", "cpu"]
    assert run(in_file, stop_after=STOP_IN_EPOCH[1]) == EXIT_AFTER_SIGTERM
    assert run(in_memory) == 0
    assert_same_run(tmp_path / "resumed", tmp_path / "whole")


@pytest.fixture(scope="module")
def two_rank_runs(shards, damaged_shards, tmp_path_factory):
    """All losses in one pair of processes: starting them costs more than the runs."""
    folder = tmp_path_factory.mktemp("two_ranks")
    runs = []
    for loss, workers in CASES:
        more = ["--batch-size", "8", "--workers", workers]
        name = f"{loss}-{workers}"
        resumed = command(shards, folder, f"{name}-resumed", loss, *more, "--resume", "latest")
        runs.append({"argv": command(shards, folder, f"{name}-whole", loss, *more)})
        runs.append({"argv": resumed, "stop_after": STOP_IN_EPOCH[1], "status": EXIT_AFTER_SIGTERM})
        runs.append({"argv": resumed})
    for loss in HOST_TABLES:
        more = ["--batch-size", "8"]
        on_host = [*command(shards, folder, f"{loss}-host-resumed", loss, *more), "--resume", "latest"]
        runs.append({"argv": command(shards, folder, f"{loss}-host-whole", loss, *more)})
        in_memory = [*on_host, "--state-device", "cpu"]
        runs.append({"argv": in_memory, "stop_after": STOP_IN_EPOCH[1], "status": EXIT_AFTER_SIGTERM})
        runs.append({"argv": [*on_host, "--state-dir", str(folder)]})
    for loss in ("fastclip", "neuclip"):
        argv = command(shards, folder, f"{loss}-from-one", loss, "--resume", "latest")
        assert run(argv, stop_after=STOP_IN_EPOCH[0]) == EXIT_AFTER_SIGTERM
        runs.append({"argv": [*argv, "--batch-size", "8"]})
    more = ["--batch-size", "8", "--workers", "2", "--max-bad-fraction", "0.1"]
    resumed = command(damaged_shards, folder, "bad-resumed", "fastclip", *more, "--resume", "latest")
    runs.append({"argv": command(damaged_shards, folder, "bad-whole", "fastclip", *more)})
    runs += [{"argv": resumed, "stop_after": stop, "status": EXIT_AFTER_SIGTERM} for stop in (2, 4)]
    runs.append({"argv": resumed})
    run_on_two_ranks(runs)
    return folder


def test_bad_samples_on_two_ranks(two_rank_runs):
    assert_same_run(two_rank_runs / "bad-resumed", two_rank_runs / "bad-whole")
    assert_bad_samples_are_counted(two_rank_runs / "bad-whole")


@pytest.mark.parametrize(("loss", "workers"), CASES)
def test_two_ranks(two_rank_runs, loss, workers):
    name = f"{loss}-{workers}"
    assert_same_run(two_rank_runs / f"{name}-resumed", two_rank_runs / f"{name}-whole")


@pytest.mark.parametrize("loss", HOST_TABLES)
def test_tables_on_the_host_of_two_ranks(two_rank_runs, loss):
    assert_same_run(two_rank_runs / f"{loss}-host-resumed", two_rank_runs / f"{loss}-host-whole")


@pytest.mark.parametrize("loss", ["fastclip", "neuclip"])
def test_two_ranks_go_on_where_one_stopped(two_rank_runs, loss):
    """In mid-epoch, at the first unseen sample; per-sample state is cut anew."""
    folder = two_rank_runs / f"{loss}-from-one"
    assert [step for step, *_ in losses_of(folder)] == list(range(10))
    state = torch.load(folder / "checkpoints" / "epoch_2.state" / "step_10" / "shared.pt", weights_only=True)
    assert state["world_size"] == 2
