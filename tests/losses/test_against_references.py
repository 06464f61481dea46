"""Compare every loss with its naive float64 reference over several steps: value, gradients and the effect of the state."""

from dataclasses import replace

import pytest
import torch

from openclip_ext.contrastive import similarities
from tests.losses.cases import (
    CASES,
    GUIDE_TABLES,
    GUIDED,
    HARD,
    MASK_MARGIN,
    STEERED,
    Case,
    Step,
    add_hard_negatives,
    kinds,
    make_steps,
    run_step,
)
from tests.references.contrastive import equal_captions, hard_negatives
from tests.references.likely_false_negatives import samples
from tests.references.steering import without_reference


def _compare(case: Case, steps: list[Step]) -> None:
    loss = case.create().double()
    reference = case.reference(loss)
    for number, step in enumerate(steps):
        choice, labels = case.options.get("equal_captions", "negative"), step.labels
        if (margin := case.options.get("mask_margin")) is not None:
            known = None if choice == "negative" else labels
            choice, labels = "mask", samples(GUIDE_TABLES, step.index, step.unread, known, margin)
        with (
            equal_captions(choice, labels),
            without_reference(step.unread),
            hard_negatives(step.hard) as hard_leaf,
        ):
            expected = reference.step(step.images, step.texts, step.logit_scale, step.index, step.epoch)
        value, (images, texts, logit_scale, *hard) = run_step(loss, step)
        close = {"rtol": case.tolerance, "atol": case.tolerance}
        message = f"step {number}: {{}}".format
        torch.testing.assert_close(value.item(), expected.value, **close, msg=message)
        torch.testing.assert_close(images, expected.images, **close, msg=message)
        torch.testing.assert_close(texts, expected.texts, **close, msg=message)
        torch.testing.assert_close(logit_scale.item(), expected.logit_scale, **close, msg=message)
        if hard_leaf is not None:
            torch.testing.assert_close(hard[0], hard_leaf.grad, **close, msg=message)


@pytest.mark.parametrize("name", [*CASES, *STEERED])
def test_several_steps_with_duplicates(name: str) -> None:
    # In the fifth step, some samples of guided losses have no negatives, see below.
    _compare((CASES | STEERED)[name], make_steps(number=4 if name in GUIDED else 5))


@pytest.mark.parametrize("name", ["fastclip-mask-guided", "queueclip-mask-guided"])
def test_samples_without_negatives_are_masked(name: str) -> None:
    *_, step = make_steps()
    found = samples(GUIDE_TABLES, step.index, [], step.labels, MASK_MARGIN)
    kept = [i for i, sample in enumerate(found) if any(sample != other for other in found)]
    assert 2 <= len(kept) < len(found)
    fewer = replace(
        step,
        images=step.images[kept],
        texts=step.texts[kept],
        index=[step.index[i] for i in kept],
        labels=[step.labels[i] for i in kept],
    )
    loss, of_fewer = (GUIDED[name].create().double() for _ in range(2))
    value, gradients = run_step(loss, step)
    expected, of_kept = run_step(of_fewer, fewer)
    close = {"rtol": 1e-9, "atol": 1e-9}
    torch.testing.assert_close(value, expected, **close)
    for side in range(2):
        torch.testing.assert_close(gradients[side][kept], of_kept[side], **close)
    torch.testing.assert_close(run_step(loss, fewer), run_step(of_fewer, fewer), **close)


@pytest.mark.parametrize("name", kinds())
def test_the_operations_for_a_gpu_give_the_same(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.Tensor, "is_cpu", False, raising=False)
    _compare(CASES[name], make_steps())


@pytest.mark.parametrize("batch", [6, 2])
@pytest.mark.parametrize("name", HARD)
def test_hard_negatives(name: str, batch: int) -> None:
    steps = make_steps(batch=batch, duplicates=batch > 2)
    add_hard_negatives(steps)
    _compare((CASES | STEERED)[name], steps)


# TempNet is skipped: its dropout mask has the shape of the batch, so it differs in a batch without the sample.
@pytest.mark.parametrize(
    "name", [name for name in STEERED if not name.startswith(("tempnet", "queueclip-steered-guided"))]
)
def test_a_sample_without_reference_is_masked(name: str) -> None:
    steps = make_steps(duplicates=False)
    for number, step in enumerate(steps):
        step.unread = step.index[number : number + 2]
    _compare(STEERED[name], steps)


@pytest.mark.parametrize("name", [*CASES, *(name for name in STEERED if name not in GUIDED)])
def test_batch_of_two(name: str) -> None:
    _compare((CASES | STEERED)[name], make_steps(number=4, batch=2, seed=1, duplicates=False))


@pytest.mark.parametrize("name", CASES)
def test_identical_embeddings(name: str) -> None:
    steps = make_steps(number=2, batch=4, seed=2, duplicates=False)
    for step in steps:
        step.images[:] = step.images[0]
        step.texts[:] = step.images[0]
    _compare(CASES[name], steps)


@pytest.mark.parametrize("name", CASES)
def test_one_sample_twice_fills_the_batch(name: str) -> None:
    steps = make_steps(number=2, batch=3, seed=3, duplicates=False)
    for step in steps:
        step.index = [5, 5, 5]
    _compare(CASES[name], steps)


@pytest.mark.parametrize(
    ("name", "is_hard"), [*((name, False) for name in (*CASES, *STEERED)), *((name, True) for name in HARD)]
)
def test_chunks_of_anchors_give_the_same(name: str, is_hard: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps that process anchors in chunks equal steps without chunks, which the tests above compare with references."""
    steps, tolerance = make_steps(), (CASES | STEERED)[name].tolerance
    if is_hard:
        add_hard_negatives(steps)
    whole, chunks = ((CASES | STEERED)[name].create().double() for _ in range(2))
    expected = [run_step(whole, step) for step in steps]
    # With up to 13 pairs, a chunk has 2 anchors with 6 samples each, or 1 anchor with its prototypes.
    monkeypatch.setattr(similarities, "MAX_PAIRS", 13)
    torch.testing.assert_close([run_step(chunks, step) for step in steps], expected, rtol=tolerance, atol=tolerance)
