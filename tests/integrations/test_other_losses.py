"""The losses of other libraries in ``examples/other_losses``: they get both sides, at their temperature.

Two of the libraries normalize the embeddings again, so their gradients have no radial part.
"""

import json
import sys
from pathlib import Path

import pytest
import torch
from open_clip.loss import ClipLoss
from torch import Tensor
from torch.nn import functional

import openclip_ext
from openclip_ext.losses import registry
from openclip_ext.training import parser
from openclip_ext.training.flags import parse
from tests.losses.cases import restore_registry

_ROOT = Path(__file__).parents[2]
_SAMPLES, _DIM, _DATASET = 6, 5, 20


@pytest.fixture(autouse=True)
def example_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the example importable. Restore the registry of losses after the test."""
    restore_registry(monkeypatch)
    monkeypatch.syspath_prepend(_ROOT / "examples/other_losses")
    monkeypatch.delitem(sys.modules, "other_losses", raising=False)


def embeddings() -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    image, text = (functional.normalize(torch.randn(_SAMPLES, _DIM), dim=1).requires_grad_() for _ in range(2))
    return image, text


def gradients(name: str, **options: float) -> tuple[Tensor, ...]:
    """Return the loss of the first step and the gradients of images and texts."""
    loss = openclip_ext.create_loss(f"other_losses:{name}", embed_dim=_DIM, num_samples=_DATASET, **options)
    loss.start_epoch(0)
    image, text = embeddings()
    value = loss(image, text, torch.tensor(20.0), index=torch.arange(3, 3 + _SAMPLES))
    return value.detach(), *torch.autograd.grad(value, (image, text))


@pytest.mark.parametrize(("options", "temperature"), [({}, 0.05), ({"other_temperature": 0.1}, 0.1)])
def test_sentence_transformers_loss_is_openclips(options: dict[str, float], temperature: float) -> None:
    pytest.importorskip("sentence_transformers")
    image, text = embeddings()
    expected = ClipLoss()(functional.normalize(image), functional.normalize(text), 1 / temperature)
    torch.testing.assert_close(
        gradients("CACHED_MNRL", **options), (expected.detach(), *torch.autograd.grad(expected, (image, text)))
    )


def test_the_first_step_with_a_memory_is_openclips_with_constant_candidates() -> None:
    pytest.importorskip("pytorch_metric_learning")
    image, text = embeddings()
    own = torch.arange(_SAMPLES)
    expected = sum(
        functional.cross_entropy(functional.normalize(anchors) @ candidates.detach().T / 0.07, own) / 2
        for anchors, candidates in ((image, text), (text, image))
    )
    assert isinstance(expected, Tensor)
    torch.testing.assert_close(
        gradients("NTXENT_XBM", memory=8), (expected.detach(), *torch.autograd.grad(expected, (image, text)))
    )


@pytest.mark.parametrize("name", ["LIBAUC_SOGCLR", "LIBAUC_ISOGCLR"])
def test_libaucs_gradient_is_that_of_the_global_loss_times_the_negatives(name: str) -> None:
    """In the first step the estimate is the batch's. libauc sums over the negatives where the paper has their mean."""
    pytest.importorskip("libauc")
    tau, others = 0.05, _SAMPLES - 1
    image, text = embeddings()
    similarities = image @ text.T
    differences = torch.stack([similarities, similarities.T]) - similarities.diagonal()[:, None]
    outside = torch.eye(_SAMPLES, dtype=torch.bool)
    log_means = (differences / tau).masked_fill(outside, -torch.inf).logsumexp(dim=2) - torch.tensor(others).log()
    expected = torch.autograd.grad(others * tau * log_means.mean(), (image, text))
    torch.testing.assert_close(gradients(name, other_temperature=tau)[1:], expected)


def test_libaucs_learned_temperature_can_only_fall() -> None:
    """Its gradient is ρ plus the mean normalizer, whatever the embeddings: it lacks the derivative of the loss itself."""
    pytest.importorskip("libauc")
    falling = []
    for similarity in (-1.0, 1.0):  # negatives that are far away, and negatives as close as the positives
        loss = openclip_ext.create_loss("other_losses:LIBAUC_FASTCLIP", num_samples=_DATASET, other_lr_tau=2e-4)
        loss.start_epoch(0)
        image = functional.normalize(torch.ones(_SAMPLES, _DIM), dim=1)
        loss(image, similarity * image, torch.tensor(20.0), index=torch.arange(_SAMPLES)).backward()
        falling.append(loss.loss.loss_fn.tau.grad > 0)
    assert all(falling)


def test_a_momentum_queue_is_the_cross_entropy_among_averaged_and_earlier_keys() -> None:
    class Towers(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.randn(_DIM, _DIM, dtype=torch.float64))

        def forward(self, image: Tensor, text: Tensor) -> dict[str, Tensor]:
            return {
                "image_features": functional.normalize(image @ self.weight, dim=1),
                "text_features": functional.normalize(text @ self.weight.T, dim=1),
            }

    torch.manual_seed(0)
    memory, momentum, tau = 8, 0.75, 0.05
    loss = openclip_ext.create_loss(
        "other_losses:MOMENTUM_QUEUE", embed_dim=_DIM, key_memory=memory, key_momentum=momentum, other_temperature=tau
    ).double()
    model = Towers()
    loss.attach(model)
    average, earlier = model.weight.detach().clone(), [torch.empty(0, _DIM, dtype=torch.float64)] * 2
    for _ in range(3):  # the third batch replaces keys of the first
        inputs = torch.randn(2, _SAMPLES, _DIM, dtype=torch.float64)
        with torch.no_grad():
            model.weight.add_(torch.randn_like(model.weight))
        average = momentum * average + (1 - momentum) * model.weight.detach()
        keys = functional.normalize(inputs[0] @ average, dim=1), functional.normalize(inputs[1] @ average.T, dim=1)
        own = model(*inputs)
        expected = sum(
            functional.cross_entropy(query @ torch.cat([keys[side], earlier[side]]).T / tau, torch.arange(_SAMPLES)) / 2
            for side, query in ((1, own["image_features"]), (0, own["text_features"]))
        )
        earlier = [torch.cat([old, new])[-memory:] for old, new in zip(earlier, keys, strict=True)]
        found = loss(own["image_features"], own["text_features"], torch.tensor(20.0, dtype=torch.float64))
        assert isinstance(expected, Tensor)
        gradients = [torch.autograd.grad(value, model.weight, retain_graph=True)[0] for value in (found, expected)]
        torch.testing.assert_close(found, expected)
        torch.testing.assert_close(*gradients)


def test_the_first_step_with_a_cross_batch_memory_is_openclips() -> None:
    image, text = embeddings()
    expected = ClipLoss()(image, text, 1 / 0.05)
    found = gradients("MOMENTUM_QUEUE", key_momentum=0.0, other_temperature=0.05)
    torch.testing.assert_close(found, (expected.detach(), *torch.autograd.grad(expected, (image, text))))


def test_the_training_program_takes_each_setting_of_the_grid(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parser, "OPTIONS", registry.OPTIONS)  # the copy of this test
    grid = json.loads((_ROOT / "scripts/experiments/grids/icons-other-losses.json").read_text(encoding="utf-8"))
    for setting in (setting for settings in grid["families"].values() for setting in settings):
        given = setting.get("options", {})
        flags = [f"--{name.replace('_', '-')}={value}" for name, value in given.items()]
        argv = ["--train-data", "0.tar", "--loss", setting["loss"], *flags]
        parser.import_losses(argv)
        assert given.items() <= parse(argv).loss_options.items()


def test_a_momentum_encoder_that_no_program_has_attached_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="attach"):
        gradients("MOMENTUM_QUEUE")
