"""With every loss, two linear encoders learn to match pairs in an ordinary training loop."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from openclip_ext.losses.heads import with_heads
from openclip_ext.losses.registry import create_loss, list_losses
from tests.losses.cases import TwoTowers

SAMPLES, LATENT, WIDTH, BATCH, EPOCHS = 240, 10, 16, 24, 10

# Replacements for defaults that suit only long runs. AmorLIP's networks must be fitted within this short run to guide the
# encoders.
_SMALL = {
    "neuclip": {"prototypes": 48, "restart_every": 50},
    "queueclip": {"prototypes": 96},
    "amorlip": {
        "reinitialize": False,
        "fit_every": 1,
        "target_every": 1,
        "ema_decay": 0.0,
        "normalizer_updates": 10,
        "normalizer_lr": 1e-2,
    },
}


def _pairs() -> tuple[Tensor, Tensor]:
    """Return images and texts (240, 24): two linear views of the same latent variables."""
    random = torch.Generator().manual_seed(0)
    latent = torch.randn(SAMPLES, LATENT, generator=random)
    images, texts = (latent @ torch.randn(LATENT, 24, generator=random) for _ in range(2))
    return images + 0.3 * torch.randn(images.shape, generator=random), texts


@torch.no_grad()
def _recall(model: nn.Module, images: Tensor, texts: Tensor) -> float:
    outputs = model(images, texts)
    best = (outputs["image_features"] @ outputs["text_features"].T).argmax(dim=1)
    return (best == torch.arange(len(best))).float().mean().item()


def _train(name: str, options: dict[str, Any]) -> tuple[float, float, dict[str, float]]:
    """Train a model; return its recall at 1 before and after the training, and the metrics of the last step."""
    torch.manual_seed(0)
    images, texts = _pairs()
    loss = create_loss(name, embed_dim=WIDTH, num_samples=SAMPLES, **options)
    if loss.views == 1 and (head := loss.model_head()) is not None and not head.evaluated:
        pytest.skip("without the loss's head, the encoders need not match pairs")
    model = TwoTowers(24, WIDTH, loss.initial_logit_scale, loss.initial_logit_bias)
    model.logit_scale.requires_grad_(loss.learns_logit_scale)
    head = loss.model_head()
    evaluated = with_heads(model, head)
    before = _recall(evaluated.eval(), images, texts)
    evaluated.train()
    trained = nn.ModuleList([model] if head is None else [model, head])
    optimizer = torch.optim.AdamW([p for p in trained.parameters() if p.requires_grad], lr=3e-3, weight_decay=0.0)
    for epoch in range(EPOCHS):
        loss.start_epoch(epoch)
        for index in torch.randperm(SAMPLES).split(BATCH):
            old = model.logit_scale.detach().clone()
            terms = loss(**model(images[index], texts[index]), index=index, output_dict=True)
            optimizer.zero_grad()
            sum(terms.values()).backward()
            optimizer.step()
            loss.finish_logit_scale_step(model.logit_scale, old)
    return before, _recall(evaluated.eval(), images, texts), loss.metrics()


@pytest.mark.parametrize("name", list_losses())
def test_learns(name: str) -> None:
    before, after, metrics = _train(name, _SMALL.get(name, {}))
    assert before < 0.05
    assert after > 0.4
    assert metrics["infonce"] < 0.6 * metrics["chance"]
    assert 0.0099 <= metrics["temperature_min"] <= metrics["temperature_max"] <= 1.0


def test_verifying_the_fit_keeps_neuclip_from_collapse() -> None:
    """With few updates after each restart, the published NeuCLIP collapses, because AdaGrad's first step is ±1 per value."""
    options = {"prototypes": 48, "restart_every": 10, "normalizer_updates": 1, "temperature": 0.03}
    _, published, metrics = _train("neuclip", options | {"verify_fit": False})
    assert published < 0.1
    assert metrics["infonce"] > metrics["chance"]
    _, verified, metrics = _train("neuclip", options | {"verify_fit": True})
    assert verified > 0.4
    assert metrics["infonce"] < 0.6 * metrics["chance"]
