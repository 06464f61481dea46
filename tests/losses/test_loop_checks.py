"""In its first calls, a loss warns once about each silent mistake in the training loop. A correct loop gets no warning."""

import math
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from openclip_ext.contrastive.loop_checks import CHECKED_CALLS
from openclip_ext.contrastive.loss import ContrastiveLoss
from openclip_ext.integrations.model_loss import ModelLoss
from openclip_ext.losses.registry import create_loss, list_losses
from tests.losses.cases import WIDTH, TwoTowers, create_any, make_steps

# Every warning outside of pytest.warns fails the test.
pytestmark = pytest.mark.filterwarnings("error")
STATEFUL = ["fastclip", "neuclip", "queueclip", "amorlip", "sogclr-views"]


def _batches(number: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    for step in make_steps(number, duplicates=False):
        yield step.images.float(), step.texts.float(), torch.tensor(step.index)


def _features() -> tuple[Tensor, Tensor]:
    return next(_batches(1))[:2]


def _start(name: str) -> tuple[TwoTowers, ContrastiveLoss, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model, loss = TwoTowers(WIDTH, WIDTH), create_any(name)
    head = loss.model_head()
    parameters = [*model.parameters(), *([] if head is None else head.parameters())]
    loss.start_epoch(0)
    return model, loss, torch.optim.SGD(parameters, lr=1e-5)


@pytest.mark.parametrize("name", list_losses())
def test_a_correct_loop_gets_no_warning(name: str) -> None:
    model, loss, optimizer = _start(name)
    for images, texts, index in _batches(4):
        value = loss(**model(images, texts), index=index)
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
    loss.eval()
    for _ in range(2):  # evaluation calls need no optimizer step
        loss(**model(images, texts), index=index)


def test_accumulation_over_cached_features_is_no_mistake() -> None:
    model, loss, optimizer = _start("neuclip")
    for images, texts, index in _batches(3):
        optimizer.zero_grad()
        outputs = model(images, texts)
        leaves = {name: value.detach().requires_grad_() for name, value in outputs.items()}
        loss(**leaves, index=index).backward()
        names = [name for name in outputs if leaves[name].grad is not None]
        torch.autograd.backward([outputs[name] for name in names], [leaves[name].grad for name in names])
        optimizer.step()


@pytest.mark.parametrize("name", ["openclip", "siglip", "simclr", "cliplite", "fastclip-minibatch"])
def test_losses_without_state_may_be_called_twice_in_a_step(name: str) -> None:
    model, loss, _ = _start(name)
    for images, texts, index in _batches(4):
        loss(**model(images, texts), index=index).backward()


def _call(loss: ContrastiveLoss, scale: float = 14.0, **changed: Any) -> Tensor:
    """Call a loss with 6 samples; ``changed`` replaces inputs. With ``announced=False``, ``start_epoch`` is not called."""
    images, texts, index = next(_batches(1))
    if changed.pop("announced", True):
        loss.start_epoch(0)
    inputs = {"image_features": images, "text_features": texts, "index": index} | changed
    return loss(**inputs, logit_scale=torch.tensor(scale))


_NOT_UNIT = r"expected rows of unit norm, found norms from 1 to 3\. .*functional\.normalize"
_NO_EPOCH = r"start_epoch\(\) was not called.*at the start of each epoch, from 0"


@pytest.mark.parametrize(
    ("names", "changed", "message"),
    [
        ("openclip siglip neuclip", {"image_features": 3 * _features()[0]}, _NOT_UNIT),
        ("openclip siglip neuclip", {"text_features": 3 * _features()[1]}, _NOT_UNIT),
        (
            "openclip neuclip cliplite",
            {"scale": 2.66},
            r"expected 1/temperature.* found 2\.66\. .*logit_scale\.exp\(\)",
        ),
        ("fastclip isogclr tempnet", {"index": torch.full((6,), 3)}, r"all samples of a batch have one index"),
        ("fastclip fastclip-v2 tempnet amorlip sogclr-views-cosine", {"announced": False}, _NO_EPOCH),
        ("openclip queueclip", {"positives": torch.arange(6)}, r"positives: ignored.*equal_captions"),
    ],
)
def test_a_mistake_warns_once(names: str, changed: dict[str, Any], message: str) -> None:
    for name in names.split():
        loss = create_any(name).requires_grad_(False)
        changed = {"logit_bias": torch.tensor(-10.0)} | changed
        with pytest.warns(UserWarning, match=message):
            _call(loss, **changed)
        _call(loss, **changed)


def test_what_is_no_mistake() -> None:
    images, texts = _features()
    for name in ("isogclr", "simclr", "sogclr-views"):  # their temperature is not the model's
        _call(create_any(name), scale=2.0)
    _call(create_loss("neuclip", embed_dim=WIDTH, prototypes=4, temperature=1.0), scale=1.0)
    for name in ("cliplite", "simclr"):  # their projections accept any norm
        _call(create_any(name), image_features=5 * images)
    _call(create_any("openclip"), labels=torch.zeros(6, 3, dtype=torch.int64), logits=torch.zeros(6, 3, 5))
    _call(create_any("neuclip"), logit_bias=torch.tensor(1.0), labels=None)
    images[2] = float("nan")  # the result is NaN instead
    for dtype in (torch.float16, torch.bfloat16):
        _call(create_any("neuclip"), image_features=images.to(dtype), text_features=texts.to(dtype))


def test_a_constant_schedule_and_a_restored_epoch_need_no_announcement() -> None:
    images, texts, index = next(_batches(1))
    for name in ("sogclr", "neuclip"):
        for _ in range(8):
            create_any(name)(images, texts, torch.tensor(14.0), index=index)
    saved = create_any("fastclip")
    saved.start_epoch(2)
    resumed = create_any("fastclip")
    resumed.load_state_dict(saved.state_dict())
    resumed(images, texts, torch.tensor(14.0), index=index)


@pytest.mark.parametrize("name", ["openclip", "neuclip", "cliplite", "simclr"])
@pytest.mark.parametrize("scale", [-2.66, 0.0, math.inf, math.nan])
def test_a_scale_that_is_no_positive_number(name: str, scale: float) -> None:
    with pytest.raises(ValueError, match=rf"logit_scale: expected .* finite positive number, found {scale:g}\. Pass"):
        create_any(name)(*_features(), torch.tensor(scale))


def test_values_are_read_in_the_first_calls_only(monkeypatch: pytest.MonkeyPatch) -> None:
    loss = create_any("neuclip")
    features = _features()
    for _ in range(CHECKED_CALLS):
        loss(*features, torch.tensor(14.0))
    for name in ("item", "tolist"):
        monkeypatch.setattr(Tensor, name, None)  # from now on, reading a value fails
    loss(*features, torch.tensor(2.66))


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("name", [name for name in list_losses() if name not in ("simclr", "sogclr")])
def test_a_checkpointed_loss(name: str, use_reentrant: bool) -> None:
    """Activation checkpointing calls the loss again in the backward pass, so losses with state must reject it."""
    expected, loss = create_any(name), create_any(name)
    scale = torch.tensor(20.0)
    for images, texts, index in _batches(2):
        features = [side.clone().requires_grad_() for side in (images, texts, images, texts)]
        options = {"index": index, "logit_bias": torch.tensor(-10.0)}

        def call(image: Tensor, text: Tensor, options: Any = options) -> Tensor:
            return loss(image, text, scale, **options)

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if loss.keeps_state:
                with pytest.raises(RuntimeError, match="would update its state twice"):
                    checkpoint(call, *features[:2], use_reentrant=use_reentrant).backward()
                loss.eval()  # a call in evaluation mode changes no state, so it can be repeated
                checkpoint(call, *features[:2], use_reentrant=use_reentrant).backward()
                return
            checkpoint(call, *features[:2], use_reentrant=use_reentrant).backward()
            expected(*features[2:], scale, **options).backward()
        for own, other in zip(features[:2], features[2:], strict=True):
            torch.testing.assert_close(own.grad, other.grad, rtol=0, atol=0)
    torch.testing.assert_close(loss.state_dict(), expected.state_dict(), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("name", STATEFUL)
def test_a_second_call_before_the_backward_pass(name: str) -> None:
    model, loss, _ = _start(name)
    images, texts, index = next(_batches(1))
    first = loss(**model(images, texts), index=index, output_dict=True)
    with pytest.warns(UserWarning, match=r"before the backward pass of the previous call.*loss\.eval\(\)"):
        second = loss(**model(images, texts), index=index)
    (sum(first.values()) + second).backward()


@pytest.mark.parametrize("name", STATEFUL)
def test_a_validation_that_forgot_eval(name: str) -> None:
    model, loss, optimizer = _start(name)
    images, texts, index = next(_batches(1))
    for _ in range(CHECKED_CALLS + 1):
        loss(**model(images, texts), index=index).backward()
        optimizer.step()
    with torch.no_grad(), pytest.warns(UserWarning, match=r"in training mode under torch\.no_grad\(\).*loss\.eval\(\)"):
        loss(**model(images, texts), index=index)
    loss.eval()
    with torch.no_grad():
        loss(**model(images, texts), index=index)


def test_unconnected_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """They cause a warning in a custom loop, but an error in an integration, because its trainer should connect them."""
    model_loss = ModelLoss(create_loss("openclip"), TwoTowers(WIDTH, WIDTH))
    model_loss.check_loop(accumulation=1, repeats=False)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.warns(UserWarning, match=r"2 processes were started .* each process compares only its own"):
        create_loss("openclip")(*_features(), torch.tensor(10.0))
    with pytest.raises(ValueError, match=r"did not connect 2 processes.*use_cpu=True.*devices=2"):
        model_loss.check_loop(accumulation=1, repeats=False)
