"""FSDP2 over two processes trains as DDP does: every loss, every way to compute a step; and checkpoints go both ways."""

import functools
from pathlib import Path

import open_clip
import pytest
import torch

from openclip_ext.training.parallel import blocks_of
from tests.distributed import sharding_cases
from tests.distributed.pool import two_ranks
from tests.distributed.sharding_cases import CASES, REPLICATED, RESUMED, SHARDED
from tests.training.runs import (
    EXIT_AFTER_SIGTERM,
    assert_same_run,
    command,
    final_state,
    make_shards,
    results_of,
    run,
    run_on_two_ranks,
    stock_model,
)
from tests.training.tiny import assert_close, tensors

# The order of additions is all that differs; AdaGrad and Adam amplify it where a gradient is nearly zero.
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-6, torch.bfloat16: 1e-6}


@functools.cache
def trained(name: str) -> list[dict]:
    """What each rank has after a case, both ways."""
    return two_ranks().run(sharding_cases.trained, name)


@pytest.mark.parametrize("name", CASES)
def test_spread_parameters_train_as_replicas(name):
    """Values, parameters, optimizer and loss state after three steps, under the names and shapes of a whole model."""
    results = trained(name)[0]
    assert_close(results[SHARDED], results[REPLICATED], rtol=0, atol=TOLERANCE[CASES[name].way.dtype])


def test_the_comparison_sees_a_difference():
    """Parameters move by far more than the tolerance, so equality means something."""
    first, second = (trained(name)[0][SHARDED] for name in ("fastclip", "neuclip"))
    same_names = [name for name in first if name.startswith(".model")]
    assert max(float((first[name] - second[name]).abs().max()) for name in same_names) > 1e-5


def test_all_processes_skip_a_step_that_overflows():
    result = trained("amorlip-amp-overflow")[0][SHARDED]
    assert result[".scale"] == CASES["amorlip-amp-overflow"].way.scale / 4  # halved twice
    assert result[".optimizer.state.0.step"] == 1


@pytest.mark.parametrize("name", RESUMED)
def test_a_run_goes_on_the_same_or_the_other_way(name):
    expected = trained(name)[0][SHARDED]
    resumed, _ = two_ranks().run(sharding_cases.resumed_both_ways, name)
    assert_close(resumed[SHARDED, SHARDED], expected, rtol=0, atol=0)
    for switch in ((SHARDED, REPLICATED), (REPLICATED, SHARDED)):
        assert_close(resumed[switch], expected, rtol=0, atol=TOLERANCE[CASES[name].way.dtype])


def test_only_the_master_holds_the_whole_model():
    assert [name for name in trained("fastclip")[1][SHARDED] if name.startswith(".model")] == []


def test_evaluations_see_the_trained_model():
    assert two_ranks().run(sharding_cases.evaluated)[0] == []


def test_what_cannot_be_spread_is_refused_with_the_reason():
    types, optimizer, scaler = two_ranks().run(sharding_cases.refused)[0]
    assert "torch.bfloat16, torch.float32" in types or "torch.float16, torch.float32" in types
    assert "timm/lamb is not known to allow" in optimizer
    assert "GradScaler cannot scale" in scaler


# Blocks of the visual tower and 12 of the text tower's; a timm tower's stages are stacked, too.
@pytest.mark.parametrize(
    ("model", "number"), [("ViT-B-32", 12 + 12), ("RN50", 16 + 12), ("convnext_base", 4 + 36 + 12)]
)
def test_blocks_of_towers(model, number):
    with torch.device("meta"):
        blocks = blocks_of(open_clip.create_model(model, device="meta", load_weights=False))
    assert len(blocks) == number
    # Inner ones first, as fully_shard wants them.
    for position, block in enumerate(blocks):
        assert not any(module in blocks[position + 1 :] for module in list(block.modules())[1:])


# --- the command line ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trainings(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("fsdp")
    shards = make_shards(folder / "shards")
    more = ["--batch-size", "8", "--val-data", shards]

    def planned(name: str, *flags: str, stop_after: int | None = None) -> dict:
        argv = command(shards, folder, name, "neuclip", *more, "--resume", "latest", *flags)
        return {"argv": argv} | ({"stop_after": stop_after, "status": EXIT_AFTER_SIGTERM} if stop_after else {})

    runs = [
        planned("ddp"),
        planned("fsdp", "--fsdp"),
        planned("resumed", "--fsdp", stop_after=3),
        planned("resumed", "--fsdp"),
        planned("to-fsdp", stop_after=3),
        planned("to-fsdp", "--fsdp"),
        planned("to-ddp", "--fsdp", stop_after=8),
        planned("to-ddp"),
    ]
    run_on_two_ranks(runs)
    return folder


def test_a_resumed_run_is_the_uninterrupted_one(trainings):
    assert_same_run(trainings / "resumed", trainings / "fsdp")


@pytest.mark.parametrize("name", ["fsdp", "to-fsdp", "to-ddp"])
def test_sharded_and_replicated_runs_agree(trainings, name):
    found, expected = (final_state(trainings / run) for run in (name, "ddp"))
    for state in (found, expected):
        model = state["model"]["state_dict"]
        state["model"]["state_dict"] = {key.removeprefix("module."): value for key, value in model.items()}
    assert_close(tensors(found), tensors(expected), rtol=1e-4, atol=1e-5)


def test_stock_openclip_loads_and_the_evaluation_was_of_the_checkpoint(trainings):
    stock_model(trainings / "fsdp" / "checkpoints" / "epoch_2.pt")
    results = [results_of(trainings / run) for run in ("fsdp", "ddp")]
    for sharded, replicated in zip(*results, strict=True):
        assert sharded["clip_val_loss"] == pytest.approx(replicated["clip_val_loss"], rel=1e-4)


def test_a_single_process_has_nobody_to_share_with(trainings, tmp_path, caplog):
    shard = str(trainings / "shards" / "00000.tar")
    assert run(command(shard, tmp_path, "alone", "openclip", "--fsdp", "--batch-size", "4")) == 0
    assert "--fsdp does nothing in a single process" in caplog.text
