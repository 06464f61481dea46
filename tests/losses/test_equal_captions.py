"""Equal captions: properties of all losses, rejected inputs, and a comparison of OpenCLIP's loss with its reference.

``test_against_references.py`` compares the losses composed of parts with their references.
"""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from openclip_ext.contrastive.loss import ContrastiveLoss
from openclip_ext.losses.registry import create_loss
from tests.distributed.pool import WORLD_SIZE, two_ranks
from tests.losses.cases import CASES, WIDTH, Step, make_steps, run_step
from tests.references.contrastive import InfoNce, equal_captions

TREATED = [name for name in CASES if "equal_captions" in CASES[name].options]
CHOICES = ("mask", "positive")
ALL = [*TREATED, "openclip-mask", "openclip-positive"]


def _create(name: str, **options: Any) -> ContrastiveLoss:
    """Return a new loss for a name in :data:`ALL`."""
    if name in CASES:
        return CASES[name].create(**options)
    return create_loss("openclip", **{"equal_captions": name.removeprefix("openclip-")} | options)


def _openclip(choice: str, **options: Any) -> ContrastiveLoss:
    return _create(f"openclip-{choice}", **options)


@pytest.mark.parametrize("choice", CHOICES)
def test_openclips_loss_against_its_reference(choice: str) -> None:
    for step in make_steps():
        with equal_captions(choice, step.labels):
            expected = InfoNce(None).step(step.images, step.texts, step.logit_scale, step.index, step.epoch)
        value, (images, texts, logit_scale) = run_step(_openclip(choice), step)
        close = {"rtol": 1e-6, "atol": 1e-6}  # the weights from the labels are float32
        torch.testing.assert_close(value.item(), expected.value, **close)
        torch.testing.assert_close((images, texts), (expected.images, expected.texts), **close)
        assert logit_scale.item() == pytest.approx(expected.logit_scale, rel=1e-5)


@pytest.mark.parametrize("name", ALL)
def test_a_mask_gives_what_labels_give(name: str) -> None:
    by_labels, by_mask = _create(name).double(), _create(name).double()
    for number, step in enumerate(make_steps()):
        step.labels = [label + 100 * number for label in step.labels]  # a mask does not know captions of other batches
        expected = run_step(by_labels, step)
        step.labels = [[first == second for second in step.labels] for first in step.labels]
        torch.testing.assert_close(run_step(by_mask, step), expected, rtol=0, atol=0)


def _captions_and_images(labels: list[Any]) -> list[tuple[int, int]]:
    """Return two labels per sample: samples of an equal label form a chain, in which neighbors share one of the two."""
    before = [labels[:place].count(label) for place, label in enumerate(labels)]
    return [(10 * label + n // 2, 10 * label + (n + 1) // 2) for label, n in zip(labels, before, strict=True)]


# A queue compares labels only directly, not through other samples.
@pytest.mark.parametrize("name", [name for name in ALL if not name.startswith(("queueclip", "sogclr-solved"))])
def test_samples_that_share_a_caption_or_an_image_are_equal(name: str) -> None:
    by_one, by_two = _create(name).double(), _create(name).double()
    for step in make_steps():
        expected = run_step(by_one, step)
        step.labels = _captions_and_images(step.labels)
        torch.testing.assert_close(run_step(by_two, step), expected, rtol=0, atol=0)


@pytest.mark.parametrize("name", ALL)
def test_it_changes_nothing_where_all_captions_differ(name: str) -> None:
    tolerance = CASES[name].tolerance if name in CASES else 1e-9
    plain, treated = _create(name, equal_captions="negative").double(), _create(name).double()
    for number, step in enumerate(make_steps(3)):
        step.labels = list(range(100 * number, 100 * number + 6))
        expected = run_step(plain, step)
        torch.testing.assert_close(run_step(treated, step), expected, rtol=0, atol=tolerance)


# Losses with an MLP are skipped, because their target network changes in every step.
@pytest.mark.parametrize("name", [name for name in TREATED if "mlp" not in name and "amorlip" not in name])
def test_a_batch_of_one_caption_changes_nothing(name: str) -> None:
    loss = CASES[name].create().double()
    step, other = make_steps(2)
    run_step(loss, step)
    before = copy.deepcopy(loss.state_dict())
    other.labels, other.epoch = [7] * 6, step.epoch
    _, gradients = run_step(loss, other)
    assert not any(gradient.any() for gradient in gradients[:2])
    counters = {key: value for key, value in loss.state_dict().items() if "extra_state" in key}
    torch.testing.assert_close(loss.state_dict(), before | counters, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("labels", [[0, 0, 0, 0, 1, 2], [0] * 6])
@pytest.mark.parametrize("name", ALL)
def test_chance_is_infonce_of_equal_embeddings(name: str, labels: list[int]) -> None:
    """The trainer compares the metrics ``infonce`` and ``chance`` to detect collapsed (equal) embeddings."""
    loss = _create(name)
    step = make_steps(1)[0]
    step.images[:] = step.texts[:] = step.images[0].clone()
    step.labels = labels
    run_step(loss, step)
    metrics = loss.metrics()
    assert metrics["infonce"] == pytest.approx(metrics["chance"], abs=1e-6)


def test_an_anchor_whose_queue_has_only_its_caption_gets_finite_gradients() -> None:
    """The queue has room for two samples, both with the caption of the first three anchors."""
    loss, (step,) = (
        create_loss("queueclip", embed_dim=WIDTH, prototypes=2, equal_captions="mask").double(),
        make_steps(1),
    )
    step.labels = [5, 5, 5, 6, 7, 8]
    value, gradients = run_step(loss, step)
    assert value.isfinite() and all(gradient.isfinite().all() for gradient in gradients)
    with pytest.raises(ValueError, match="at most 2"):
        loss(*_inputs(), positives=torch.zeros(6, 3, dtype=torch.int64))


def _inputs() -> tuple[Tensor, Tensor, Tensor]:
    step = make_steps(1)[0]
    return step.images, step.texts, torch.tensor(step.logit_scale)


@pytest.mark.parametrize("name", ["neuclip", "openclip"])
def test_labels_are_checked(name: str) -> None:
    loss = create_loss(name, embed_dim=8, equal_captions="mask")
    for labels, message in (
        (None, "pass positives="),
        (torch.arange(5), r"shape \(6,\) or \(6, k\), or bool of shape \(6, 6\), found \(5,\)"),
        (torch.eye(6), r"found \(6, 6\) torch.float32"),
        ([0] * 6, "found 'list'"),
    ):
        with pytest.raises(ValueError, match=message):
            loss(*_inputs(), positives=labels)


@pytest.mark.parametrize(
    ("pairs", "named"),
    [
        ({(2, 2): False}, "0 and 2: .* true diagonal"),
        ({(1, 3): True}, "1 and 3: expected a symmetric mask"),
        ({(0, 1): True, (1, 0): True, (1, 2): True, (2, 1): True}, "1 and 2: .* third caption equal each other"),
    ],
)
def test_an_inconsistent_mask_is_refused(pairs: dict[tuple[int, int], bool], named: str) -> None:
    mask = torch.eye(6, dtype=torch.bool)
    for pair, value in pairs.items():
        mask[pair] = value
    with pytest.raises(ValueError, match=f"inconsistent mask at samples {named}"):
        create_loss("neuclip", embed_dim=WIDTH, equal_captions="mask")(*_inputs(), positives=mask)


def test_a_captioner_is_refused() -> None:
    captions = {"logits": torch.randn(6, 5, 11), "labels": torch.randint(1, 11, (6, 5))}
    with pytest.raises(ValueError, match="CoCa and distillation models support neither equal_captions"):
        _openclip("mask")(*_inputs(), positives=torch.arange(6), **captions)


def _on_this_rank(choice: str, local_loss: bool) -> tuple[Tensor, list[Tensor]]:
    with pytest.raises(ValueError, match="a mask cannot compare captions across 2 processes"):
        _openclip(choice)(*_inputs(), positives=torch.eye(6, dtype=torch.bool))
    own = slice(torch.distributed.get_rank() * 3, torch.distributed.get_rank() * 3 + 3)
    step = make_steps(2)[1]
    labels = _captions_and_images(step.labels)[own]
    part = Step(step.images[own], step.texts[own], step.logit_scale, step.index[own], 0, labels)
    return run_step(_openclip(choice, local_loss=local_loss, gather_with_grad=True), part)


@pytest.mark.parametrize("local_loss", [False, True])
@pytest.mark.parametrize("choice", CHOICES)
def test_openclips_loss_in_two_processes_equals_one_and_takes_no_mask(choice: str, local_loss: bool) -> None:
    ranks = two_ranks().run(_on_this_rank, choice, local_loss)
    expected, gradients = run_step(_openclip(choice), make_steps(2)[1])
    torch.testing.assert_close(sum(value for value, _ in ranks) / WORLD_SIZE, expected)
    for side in (0, 1):
        together = torch.cat([found[side] for _, found in ranks]) / WORLD_SIZE
        torch.testing.assert_close(together, gradients[side])
