"""If an input of a loss's ``forward`` is wrong, the error contains the expected and the found value."""

import pytest
import torch
from torch import Tensor

from openclip_ext import distributed
from openclip_ext.losses.registry import create_loss
from tests.losses.cases import SAMPLES, WIDTH, make_steps


def _features(rows: int = 4, width: int = WIDTH, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.nn.functional.normalize(torch.ones(rows, width), dim=1).to(dtype)


@pytest.mark.parametrize(
    ("images", "texts", "message"),
    [
        (_features(4), _features(3), r"expected two tensors of shape \(batch, width\), found \(4, 8\) and \(3, 8\)"),
        (_features(4, 6), _features(4, 6), "expected features of width embed_dim=8, found 6"),
        (_features(4).long(), _features(4).long(), r"image features: expected a float.*, found \(4, 8\) torch.int64"),
        (None, _features(4), "image features: expected a floating-point tensor .*, found 'NoneType'"),
        (_features(4), _features(4).numpy(), "text features: expected a floating-point tensor .*, found 'ndarray'"),
        (_features(0), _features(0), "image and text features: found an empty batch"),
        (_features(1), _features(1), "at least 2 samples, found 1.*drop_last"),
    ],
)
def test_wrong_features(images: Tensor, texts: Tensor, message: str) -> None:
    loss = create_loss("neuclip", embed_dim=WIDTH, prototypes=4)
    with pytest.raises(ValueError, match=message):
        loss(images, texts, torch.tensor(10.0))


def test_wrong_logit_scale() -> None:
    loss = create_loss("neuclip", embed_dim=WIDTH, prototypes=4)
    with pytest.raises(ValueError, match=r"logit_scale: expected one number, found \(2,\)"):
        loss(_features(), _features(), torch.ones(2))
    with pytest.raises(ValueError, match=r"logit_scale: expected one number, found None"):
        loss(_features(), _features(), None)
    assert loss(_features(), _features(), torch.tensor([[10.0]])) == loss(_features(), _features(), 10.0)


def test_an_index_in_the_place_of_the_logit_bias() -> None:
    for name in ("fastclip", "queueclip"):
        loss = create_loss(name, embed_dim=WIDTH, num_samples=100)
        with pytest.raises(ValueError, match=r"logit_bias: .*index="):
            loss(_features(), _features(), torch.tensor(10.0), torch.arange(len(_features())))


def test_epochs_count_from_0() -> None:
    with pytest.raises(ValueError, match=r"start_epoch\(-1\): epochs count from 0"):
        create_loss("neuclip", embed_dim=WIDTH, prototypes=4).start_epoch(-1)


@pytest.mark.parametrize(
    ("index", "message"),
    [
        (None, "needs index="),
        (torch.tensor([0, 1, 2]), r"expected int64 of shape \(4,\), found \(3,\)"),
        (torch.tensor([True, False, True, False]), "expected int64 of shape .* torch.bool"),
        ([0, 1, 2, 3], "expected int64 of shape .* found 'list'"),
        (torch.tensor([0, -1, 2, 3]), r"index \[-1\]: expected 0 <= index < num_samples=20"),
    ],
)
def test_wrong_index(index: Tensor | None, message: str) -> None:
    loss = create_loss("fastclip", num_samples=SAMPLES)
    with pytest.raises(ValueError, match=message):
        loss(_features(), _features(), torch.tensor(10.0), index=index)
    assert loss.state_dict()["normalizer.table.shard"].isnan().all()


@pytest.mark.parametrize("name", ["openclip", "siglip", "fastclip"])
def test_a_loss_that_was_created_with_other_processes_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distributed, "world_size", lambda: 2)
    loss = create_loss(name, num_samples=SAMPLES)
    monkeypatch.undo()
    with pytest.raises(ValueError, match=r"created with 2 process\(es\) and is used with 1"):
        loss(_features(), _features(), torch.tensor(10.0), torch.tensor(-10.0), index=torch.arange(4))


def test_index_that_is_not_needed_is_ignored() -> None:
    loss = create_loss("queueclip", embed_dim=WIDTH, prototypes=4)
    for index in (torch.tensor([99, -1, 5, 5]), torch.tensor([1])):
        assert torch.isfinite(loss(_features(), _features(), torch.tensor(10.0), index=index))


def test_smaller_integers_are_an_index_too() -> None:
    loss = create_loss("fastclip", num_samples=SAMPLES)
    assert torch.isfinite(loss(_features(), _features(), torch.tensor(10.0), index=torch.arange(4, dtype=torch.int32)))


def test_index_out_of_range_on_a_device_is_masked_and_raised_at_the_next_log(monkeypatch: pytest.MonkeyPatch) -> None:
    loss = create_loss("fastclip", num_samples=SAMPLES).double()
    step = make_steps(1, duplicates=False)[0]
    arguments = (step.images, step.texts, torch.tensor(step.logit_scale))
    wrong = torch.tensor([*step.index[:5], SAMPLES])
    monkeypatch.setattr(Tensor, "is_cpu", False)
    masked = loss(*arguments, index=wrong)
    monkeypatch.undo()
    smaller = create_loss("fastclip", num_samples=SAMPLES).double()
    expected = smaller(step.images[:5], step.texts[:5], arguments[2], index=wrong[:5])
    assert masked.item() == pytest.approx(expected.item(), rel=1e-12)
    with pytest.raises(ValueError, match=r"an index was outside of \[0, 20\)"):
        loss.metrics()
    assert loss.metrics()["infonce"] > 0
