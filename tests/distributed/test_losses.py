"""Losses on two processes equal losses on one process with the full batch: values, gradients (averaged) and state."""

import functools
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from openclip_ext.contrastive import similarities
from openclip_ext.contrastive.loss import ContrastiveLoss
from tests.distributed.pool import WORLD_SIZE, two_ranks
from tests.losses.cases import (
    CASES,
    HARD,
    REFERENCE_WIDTH,
    STEERED,
    Case,
    Step,
    add_hard_negatives,
    assert_close,
    make_steps,
    reference_of,
    run_step,
)
from tests.references import networks

STEPS = 5
# AmorLIP with a separate stage II in each process. By design, its result differs from the result of one process.
LOCAL_AMORLIP = "amorlip-local"
# Suffixes of cases with NaN or inf, samples whose reference embeddings are zero, anchors in chunks, and hard negatives.
NONFINITE, UNREAD, CHUNKS, WITH_HARD = "-nonfinite", "-unread", "-chunks", "-hard"
DISTILLED = "-distilled"
_SPOILT = [
    "fastclip",
    "fastclip-v2",
    "tempnet",
    "amorlip",
    "neuclip",
    "queueclip",
    "scent",
    "queueclip-steered-distilled",
]
_UNREAD = ["amorlip-steered", "fastclip-distilled", "queueclip-steered-distilled"]
_CHUNKED = ["fastclip-v2", "tempnet", "neuclip", "queueclip", "fastclip-distilled"]
NAMES = [
    *(*CASES, *STEERED, "openclip"),
    *(name + NONFINITE for name in _SPOILT),
    *(name + UNREAD for name in _UNREAD),
    *(name + CHUNKS for name in _CHUNKED),
    *(name + WITH_HARD for name in HARD),
]


def _case(name: str) -> Case:
    if name == LOCAL_AMORLIP:
        gathered = CASES["amorlip"]
        return Case(gathered.loss, None, gathered.options | {"gather_stage2": False}, gathered.tolerance)
    if name == LOCAL_AMORLIP + DISTILLED:
        local = _case(LOCAL_AMORLIP)
        distilled = {"steer": False, "distill": 0.3, "reference_dim": REFERENCE_WIDTH}
        return replace(local, options=local.options | distilled)
    if name == "openclip":
        return Case("openclip", None, {"local_loss": True, "gather_with_grad": True})
    return (CASES | STEERED)[
        name.removesuffix(NONFINITE).removesuffix(UNREAD).removesuffix(CHUNKS).removesuffix(WITH_HARD)
    ]


def _steps(name: str) -> list[Step]:
    steps = make_steps(STEPS)
    if name.endswith(NONFINITE):
        steps[1].images[1, 2] = float("nan")
        steps[2].texts[5, 0] = float("inf")
    if name.endswith(UNREAD):
        for number, step in enumerate(steps):
            step.unread = [step.index[number]]
    if name.endswith(WITH_HARD):
        add_hard_negatives(steps)
    return steps


def _run(loss: ContrastiveLoss, steps: list[Step]) -> dict[str, Any]:
    results = [run_step(loss, step) for step in steps]
    last = steps[-1]
    return {
        "values": [value for value, _ in results],
        "gradients": [gradients for _, gradients in results],
        "state": loss.state_dict(),
        "log_normalizers": loss.log_normalizers(
            last.images,
            last.texts,
            torch.tensor(last.logit_scale),
            torch.tensor(last.index),
            **reference_of(loss, last.index, last.unread),
        ),
        "metrics": loss.metrics(),
    }


def _own_part(step: Step, rank: int) -> Step:
    size = len(step.index) // WORLD_SIZE
    own = slice(rank * size, (rank + 1) * size)
    part = step.images[own], step.texts[own], step.logit_scale, step.index[own], step.epoch, step.labels[own]
    return Step(*part, step.unread, None if step.hard is None else step.hard[own])


def _run_own_part(name: str) -> dict[str, Any]:
    """Run a case on this rank's part of the batches; return its results."""
    loss = _case(name).create().double()
    pairs = 13 if name.endswith(CHUNKS) else similarities.MAX_PAIRS
    with mock.patch.object(similarities, "MAX_PAIRS", pairs):
        return _run(loss, [_own_part(step, dist.get_rank()) for step in _steps(name)])


@functools.cache
def two_processes(name: str) -> list[dict[str, Any]]:
    """Run a case on two ranks; return the results of each rank."""
    return two_ranks().run(_run_own_part, name)


def _averaged(ranks: list[dict[str, Any]], step: int) -> list[torch.Tensor]:
    """Return a step's gradients in the form of one process. As in DDP, gradients are averaged over ranks."""
    gradients = [rank["gradients"][step] for rank in ranks]
    images, texts, *hard = (
        torch.cat([gradient[place] for gradient in gradients]) / WORLD_SIZE
        for place in range(len(gradients[0]))
        if place != 2
    )
    return [images, texts, sum(gradient[2] for gradient in gradients) / WORLD_SIZE, *hard]


def _whole_state(states: list[dict[str, Any]]) -> dict[str, Any]:
    """Concatenate the state shards of all ranks, to compare the result with the state of one process."""
    return {
        key: torch.cat([state[key] for state in states], dim=1) if key.endswith(".shard") else value
        for key, value in states[0].items()
    }


@pytest.mark.parametrize("name", NAMES)
def test_two_processes_equal_one(name: str) -> None:
    ranks = two_processes(name)
    case = _case(name)
    single = _run(case.create().double(), _steps(name))
    for step in range(STEPS):
        assert_close(sum(rank["values"][step] for rank in ranks) / WORLD_SIZE, single["values"][step], 1e-9)
        for actual, expected in zip(_averaged(ranks, step), single["gradients"][step], strict=True):
            assert_close(actual, expected, 1e-9)
    whole = _whole_state([rank["state"] for rank in ranks])
    assert whole.keys() == single["state"].keys()
    for key, expected in single["state"].items():
        assert_close(whole[key], expected, 1e-9)
    for side in (0, 1):
        assert_close(
            torch.cat([rank["log_normalizers"][side] for rank in ranks]), single["log_normalizers"][side], 1e-9
        )
    for metric, expected in single["metrics"].items():
        # Metrics of openclip and of reference models are means over the rows of each process, so they differ.
        if name != "openclip" and not metric.startswith("reference_"):
            assert ranks[0]["metrics"][metric] == ranks[1]["metrics"][metric] == pytest.approx(expected, abs=1e-9)


def _temperatures() -> torch.Tensor:
    """Train per-sample temperatures for a step; return the difference of this rank's temperatures from the table."""
    loss, (step,) = CASES["fastclip-v2"].create().double(), make_steps(1)
    part = _own_part(step, dist.get_rank())
    run_step(loss, part)
    index = torch.tensor(part.index)
    found = loss.anchor_temperatures(part.images, part.texts, torch.tensor(part.logit_scale), index)
    size = len(index)
    stored = loss.temperature.table.read(torch.tensor(step.index), slice(0, 2))
    return found - stored[:, dist.get_rank() * size :][:, :size]


def test_each_process_gets_the_temperatures_of_its_samples() -> None:
    assert all((difference == 0).all() for difference in two_ranks().run(_temperatures))


def _uneven(name: str, training: bool) -> str:
    """Call a loss with 4 samples on rank 0 and 3 on rank 1, as in a last batch without drop_last; return the error."""
    loss = _case(name).create().train(training)
    features = torch.nn.functional.normalize(torch.randn(4 - dist.get_rank(), 8), dim=1)
    try:
        loss(features, features, torch.tensor(10.0), index=torch.arange(len(features)))
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", ["openclip", "fastclip", "queueclip"])
def test_batches_of_different_sizes_are_an_error_on_all_ranks(name: str, training: bool) -> None:
    for message in two_ranks().run(_uneven, name, training):
        assert message.startswith("batch sizes of the ranks: expected equal sizes, found 4, 3.")


def test_amorlip_stays_in_its_process_by_default() -> None:
    ranks = two_processes(LOCAL_AMORLIP)
    case = _case(LOCAL_AMORLIP)
    gathered = CASES["amorlip"].reference(case.create().double())
    reference = networks.AmorLip(gathered.amortized, 6.5, blocks=WORLD_SIZE)
    for number, step in enumerate(_steps(LOCAL_AMORLIP)):
        expected = reference.step(step.images, step.texts, step.logit_scale, step.index, step.epoch)
        images, texts, logit_scale = _averaged(ranks, number)
        value = sum(rank["values"][number].item() for rank in ranks) / WORLD_SIZE
        assert value == pytest.approx(expected.value, rel=1e-8)
        assert_close(images, expected.images, 1e-8)
        assert_close(texts, expected.texts, 1e-8)
        assert logit_scale.item() == pytest.approx(expected.logit_scale, rel=1e-8)


def _state_after_unusable_part(name: str, world_size: int = WORLD_SIZE) -> dict[str, Any]:
    """Make a step with a single finite sample in the batch of rank 0; return the loss's state."""
    loss, (step,) = _case(name).create().double(), make_steps(1)
    step.images[1 : len(step.index) // WORLD_SIZE] = float("nan")
    run_step(loss, step if world_size == 1 else _own_part(step, dist.get_rank()))
    return loss.state_dict()


def test_amorlip_fits_equal_networks_if_one_process_has_no_usable_batch() -> None:
    expected = _state_after_unusable_part("amorlip", world_size=1)
    for state in two_ranks().run(_state_after_unusable_part, LOCAL_AMORLIP):
        for key, value in expected.items():
            assert_close(state[key], value, 1e-9)


def test_amorlip_distills_over_the_global_batch() -> None:
    names = (LOCAL_AMORLIP + DISTILLED, LOCAL_AMORLIP)
    ranks = [two_processes(name) for name in names]
    single = [_run(_case(name).create().double(), _steps(name)) for name in names]
    for step in range(STEPS):
        values = [sum(rank["values"][step] for rank in of_case) / WORLD_SIZE for of_case in ranks]
        assert_close(values[0] - values[1], single[0]["values"][step] - single[1]["values"][step], 1e-9)
        gradients = [_averaged(of_case, step) for of_case in ranks]
        expected = [of_case["gradients"][step] for of_case in single]
        for ours, without, one, one_without in zip(*gradients, *expected, strict=True):
            assert_close(ours - without, one - one_without, 1e-9)
