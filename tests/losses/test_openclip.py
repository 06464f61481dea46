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
    bias = torch.tensor(-3.0)
    assert torch.equal(loss(**features, logit_bias=bias), ClipLoss()(**features, logit_bias=bias))


def test_clip_log_normalizers_are_the_batchs(features: dict[str, torch.Tensor]) -> None:
    ours = create_loss("fastclip", normalizer="minibatch", eps=0.0).double()
    for actual, expected in zip(
        create_loss("openclip").log_normalizers(**features), ours.log_normalizers(**features), strict=True
    ):
        assert torch.allclose(actual, expected, rtol=1e-12)


def test_siglip(features: dict[str, torch.Tensor]) -> None:
    loss = create_loss("siglip")
    bias = torch.tensor(loss.initial_logit_bias)
    assert loss.initial_logit_scale == pytest.approx(math.log(10))
    terms = loss(**features, logit_bias=bias, index=torch.arange(6), output_dict=True)
    assert torch.equal(terms["contrastive_loss"], SigLipLoss()(**features, logit_bias=bias))
    assert loss.metrics()["infonce"] == pytest.approx(ClipLoss()(**features).item(), rel=1e-9)
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


def test_parameter_is_clamped_as_openclip_does() -> None:
    for name in ("openclip", "siglip"):
        parameter = torch.nn.Parameter(torch.tensor(9.0))
        create_loss(name).finish_logit_scale_step(parameter, None)
        assert parameter.item() == pytest.approx(math.log(100))
