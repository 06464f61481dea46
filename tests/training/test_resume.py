"""A resumed run is the uninterrupted one, bit for bit: every loss, 0 and 2 workers, 1 and 2 ranks."""

import pytest
import torch

from tests.training.runs import (
    EXIT_AFTER_SIGTERM,
    LOSS_FLAGS,
    assert_same_run,
    command,
    losses_of,
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
def two_rank_runs(shards, tmp_path_factory):
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
    run_on_two_ranks(runs)
    return folder


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
