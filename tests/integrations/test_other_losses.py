"""The losses of other libraries in ``examples/other_losses``: they get both sides, at their temperature.

Two of the libraries normalize the embeddings again, so their gradients have no radial part.
"""

import sys
from pathlib import Path

import pytest
import torch
from open_clip.loss import ClipLoss
from torch import Tensor
from torch.nn import functional

import openclip_ext
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
