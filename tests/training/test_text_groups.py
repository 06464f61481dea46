"""Training with groups of texts equals training with padded texts, in every way in which a step is computed."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from openclip_ext.training.step import Batch
from tests.distributed.pool import two_ranks
from tests.training import tiny
from tests.training.runs import command, metrics_of, run, run_on_two_ranks, small_command, train_on_two_ranks

PADDED = tiny.Way(dtype=torch.float64, text_lengths=(2, 5, 3, 5, 4))


def train(loss: str, way: tiny.Way, has_hard_negatives: bool = False) -> dict[str, Tensor]:
    """Take three steps on fixed batches; return the state."""

    def add_hard_negatives(batch: Batch) -> None:
        batch["hard_negative"] = batch["text"].roll(1, dims=0)

    training = tiny.TinyTraining(loss, way)
    for number in range(3):
        training.take(number, add_hard_negatives if has_hard_negatives else None)
    return {name: value for name, value in training.state().items() if value.is_floating_point()}


@pytest.mark.parametrize(
    ("loss", "changes"),
    [
        ("openclip", {}),
        ("openclip", {"compiled": True}),
        ("openclip", {"tower": "resnet"}),
        ("queueclip", {"micro_batches": 2, "checkpointing": True}),
    ],
)
def test_steps_are_those_of_padded_texts(loss, changes):
    way = replace(PADDED, **changes)
    tiny.assert_close(train(loss, replace(way, groups_texts=True)), train(loss, way), rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize(
    ("loss", "ranks", "changes"),
    [
        ("openclip", 1, {}),
        ("queueclip", 1, {"micro_batches": 2}),
        ("queueclip", 2, {}),
        ("queueclip", 2, {"sharded": True}),
    ],
)
def test_hard_negatives_are_in_the_groups(loss, ranks, changes):
    grouped, expected = replace(PADDED, groups_texts=True, **changes), train(loss, PADDED, True)
    results = [train(loss, grouped, True)] if ranks == 1 else two_ranks().run(train, loss, grouped, True)
    for result in results:  # the state of a sharded training is that of the model
        tiny.assert_close(result, {name: expected[name] for name in result}, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("changes", [{}, {"compiled": True}, {"sharded": True, "compiled": True}])
def test_two_processes_train_as_one_with_padded_texts(changes):
    expected = train("openclip", PADDED)
    found = two_ranks().run(train, "openclip", replace(PADDED, groups_texts=True, **changes))[0]
    tiny.assert_close(found, expected, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("flags", [["--accum-freq", "2"], ["--lora-rank", "2", "--lora-targets", "text"]])
def test_a_run_logs_the_share_of_padding(flags, shards, tmp_path):
    for name, more in (("grouped", []), ("padded", ["--text-groups", "1"])):
        assert run(command(shards, tmp_path, name, "openclip", "--epochs", "1", *flags, *more)) == 0
    grouped, padded = (metrics_of(tmp_path / name) for name in ("grouped", "padded"))
    assert all(0 <= line["text_padding"] < 0.5 for line in grouped)
    assert not any("text_padding" in line for line in padded)
    assert [line["loss"] for line in grouped] == pytest.approx([line["loss"] for line in padded], rel=1e-4)


def test_losses_without_texts_have_no_groups(shards, tmp_path):
    assert run(command(shards, tmp_path, "images", "simclr", "--epochs", "1")) == 0
    assert not any("text_padding" in line for line in metrics_of(tmp_path / "images"))


@pytest.mark.parametrize("flags", [["--ddp-static-graph"], ["--fsdp"]])
def test_ranks_may_have_different_groups(flags, shards, tmp_path):
    flags = ["--global-batch", "16", *flags]
    padded = ("--text-groups", "1", "--batch-size", "8")
    run_on_two_ranks(small_command(shards, tmp_path, "padded", "openclip", *padded, *flags))
    grouped = train_on_two_ranks(shards, tmp_path, "openclip", *flags)
    assert all(line["text_padding"] < 0.6 for line in metrics_of(grouped))
    losses = [[line["loss"] for line in metrics_of(folder)] for folder in (grouped, tmp_path / "padded")]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
