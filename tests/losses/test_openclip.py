"""OpenCLIP's own losses give the same results through this package as in OpenCLIP."""

import math

import pytest
import torch
from open_clip.loss import ClipLoss, CoCaLoss, DistillClipLoss, SigLipLoss

from openclip_ext.losses.registry import create_loss
from tests.losses.cases import make_steps


@pytest.fixture()
def features() -> dict[str, torch.Tensor]:
    step = make_steps(1)[0]
    return {"image_features": step.images, "text_features": step.texts, "logit_scale": torch.tensor(step.logit_scale)}


def test_clip(features: dict[str, torch.Tensor]) -> None:
    loss = create_loss("openclip")
    terms = loss(**features, index=torch.arange(6), output_dict=True)
    assert terms.keys() == {"contrastive_loss"}
    assert torch.equal(terms["contrastive_loss"], ClipLoss()(**features))
    assert torch.equal(loss(**features), ClipLoss()(**features))
    assert loss.metrics()["temperature_median"] == pytest.approx(1 / features["logit_scale"].item())
    bias = torch.tensor(-3.0)
    assert torch.equal(loss(**features, logit_bias=bias), ClipLoss()(**features, logit_bias=bias))


def test_clip_log_normalizers_are_the_batchs(features: dict[str, torch.Tensor]) -> None:
    ours = create_loss("fastclip", normalizer="minibatch", eps=0.0).double()
    for actual, expected in zip(
        create_loss("openclip").log_normalizers(**features), ours.log_normalizers(**features), strict=True
    ):
        assert torch.allclose(actual, expected, rtol=1e-12)


def test_metrics_of_a_reference_model(features: dict[str, torch.Tensor]) -> None:
    image, text = (torch.nn.functional.normalize(torch.randn(6, 3), dim=1) for _ in range(2))
    loss = create_loss("neuclip", embed_dim=features["image_features"].shape[1], reference_dim=3, steer=True)
    loss(**features, reference=(image, text))
    found, theirs = loss.metrics(), image @ text.T
    infonce = ClipLoss()(image, text, features["logit_scale"]).item()
    assert found["reference_infonce"] == pytest.approx(infonce, rel=1e-5)
    excess = features["image_features"] @ features["text_features"].T - theirs
    ahead = [excess[i, j] > excess[k, k] for i in range(6) for j in range(6) if i != j for k in (i, j)]
    assert found["reference_ahead"] == pytest.approx(sum(ahead).item() / 60)


def test_siglip(features: dict[str, torch.Tensor]) -> None:
    loss = create_loss("siglip")
    bias = torch.tensor(loss.initial_logit_bias)
    assert loss.initial_logit_scale == pytest.approx(math.log(10))
    terms = loss(**features, logit_bias=bias, index=torch.arange(6), output_dict=True)
    assert torch.equal(terms["contrastive_loss"], SigLipLoss()(**features, logit_bias=bias))
    assert loss.metrics()["infonce"] == pytest.approx(ClipLoss()(**features).item(), rel=1e-9)
    assert loss.metrics()["temperature_median"] == pytest.approx(1 / features["logit_scale"].item())
    with pytest.raises(NotImplementedError, match="has no normalizers"):
        loss.log_normalizers(**features)


def test_coca_receives_its_logits(features: dict[str, torch.Tensor]) -> None:
    outputs = {"logits": torch.randn(6, 5, 11), "labels": torch.randint(1, 11, (6, 5))}
    terms = create_loss("openclip", coca_caption_loss_weight=3.0)(**features, **outputs, output_dict=True)
    expected = CoCaLoss(caption_loss_weight=3.0, clip_loss_weight=1.0)(**features, **outputs, output_dict=True)
    assert terms.keys() == {"contrastive_loss", "caption_loss"}
    assert all(torch.equal(terms[name], expected[name]) for name in expected)


@pytest.mark.parametrize("weight", [0.0, 2.5])
def test_infonce_of_coca_is_without_its_weight(features: dict[str, torch.Tensor], weight: float) -> None:
    loss = create_loss("openclip", coca_contrastive_loss_weight=weight)
    loss(**features, logits=torch.randn(6, 5, 11), labels=torch.randint(1, 11, (6, 5)), output_dict=True)
    expected = ClipLoss()(**features).item() if weight else math.nan
    assert loss.metrics()["infonce"] == pytest.approx(expected, rel=1e-9, nan_ok=True)
    loss(**features, output_dict=True)
    assert loss.metrics()["infonce"] == pytest.approx(ClipLoss()(**features).item(), rel=1e-9)


def test_distillation_gets_its_teacher(features: dict[str, torch.Tensor]) -> None:
    teacher = {f"dist_{name}": value.flip(0) for name, value in features.items() if name != "logit_scale"}
    teacher["dist_logit_scale"] = torch.tensor(20.0)
    terms = create_loss("openclip")(**features, **teacher, output_dict=True)
    expected = DistillClipLoss()(**features, **teacher, output_dict=True)
    assert terms.keys() == {"contrastive_loss", "distill_loss"}
    assert all(torch.equal(terms[name], expected[name]) for name in expected)


def _with_hard_negatives(
    features: dict[str, torch.Tensor], hard: torch.Tensor, labels: list[int] | None, choice: str
) -> torch.Tensor:
    """Return the loss with hard negatives, computed anchor by anchor."""
    images, texts, scale = features["image_features"], features["text_features"], features["logit_scale"]
    names, total = labels or list(range(len(images))), torch.zeros(())
    for i in range(len(images)):
        equal = [j for j in range(len(images)) if names[j] == names[i]] if choice != "negative" else [i]
        others = [j for j in range(len(images)) if j == i or choice != "mask" or names[j] != names[i]]
        positives = equal if choice == "positive" else [i]
        for anchors, candidates in ((images, torch.cat([texts[others], hard])), (texts, images[others])):
            logits = scale * candidates @ anchors[i]
            at = [others.index(j) for j in positives]
            total = total + (torch.logsumexp(logits, dim=0) - logits[at].mean()) / 2
    return total / len(images)


@pytest.mark.parametrize("choice", ["negative", "mask", "positive"])
def test_hard_negatives_are_more_candidates_of_the_images(features: dict[str, torch.Tensor], choice: str) -> None:
    features = {name: value.double() for name, value in features.items()}
    hard = torch.nn.functional.normalize(torch.randn(features["image_features"].shape, dtype=torch.float64), dim=1)
    labels = [0, 1, 0, 2, 1, 3]
    given = [value.requires_grad_() for value in (*features.values(), hard)]
    loss = create_loss("openclip", equal_captions=choice)
    found = loss(**features, hard_negative_features=hard, positives=torch.tensor(labels))
    expected = _with_hard_negatives(features, hard, labels, choice)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    for actual, reference in zip(torch.autograd.grad(found, given), torch.autograd.grad(expected, given), strict=True):
        torch.testing.assert_close(actual, reference, rtol=1e-10, atol=1e-12)
    equal = {name: value.detach()[:1].expand_as(value) if value.ndim else value for name, value in features.items()}
    same = equal["image_features"]
    loss(**equal | {"text_features": same}, hard_negative_features=same, positives=torch.tensor(labels))
    assert loss.metrics()["infonce"] == pytest.approx(loss.metrics()["chance"], abs=1e-6)


def test_hard_negatives_that_do_not_fit_are_refused(features: dict[str, torch.Tensor]) -> None:
    hard = features["text_features"]
    for loss, negatives, message in (
        (create_loss("openclip"), hard[:3], r"expected the shape of text_features, \(6, 8\), found \(3, 8\)"),
        (create_loss("siglip"), hard, "does not use hard negatives"),
        (create_loss("fastclip", num_samples=9, embed_dim=8, reference_dim=3), hard, "does not use hard negatives"),
    ):
        with pytest.raises(ValueError, match=message):
            loss(**features, index=torch.arange(6), hard_negative_features=negatives)


def test_parameter_is_clamped_as_openclip_does() -> None:
    for name in ("openclip", "siglip"):
        parameter = torch.nn.Parameter(torch.tensor(9.0))
        create_loss(name).finish_logit_scale_step(parameter, None)
        assert parameter.item() == pytest.approx(math.log(100))
