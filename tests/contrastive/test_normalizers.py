"""Parts of the estimators that the comparison with the references does not show."""

import warnings
from typing import Any

import pytest
import torch

from openclip_ext.contrastive.batch import GatheredBatch, LocalBatch, finite_samples, gather_batch
from openclip_ext.contrastive.embedding_queue import EmbeddingQueue, repeated_batch
from openclip_ext.losses.amorlip import TwoSidedMlp
from openclip_ext.losses.registry import create_loss
from tests.losses.cases import WIDTH, make_steps, run_step


def _batch(images: torch.Tensor, texts: torch.Tensor) -> GatheredBatch:
    finite = finite_samples(images, texts)
    return gather_batch(LocalBatch(images, texts, torch.tensor(10.0), None, finite, images.dtype), gather=False)


def _numbered(first: int, number: int, bad: tuple[int, ...] = ()) -> GatheredBatch:
    images = torch.arange(first, first + number, dtype=torch.float32)[:, None].expand(-1, 2).clone()
    for position in bad:
        images[position, 0] = float("nan")
    return _batch(images, -images)


def _contents(queue: EmbeddingQueue) -> list[float]:
    texts, images = queue.repeated()
    assert torch.equal(texts, -images)
    return images[:, 0].tolist()


@pytest.mark.parametrize(
    ("capacity", "batches", "contents"),
    [
        (5, [(1, 2)], [1, 2, 1, 2, 1]),
        (5, [(1, 2), (3, 2)], [1, 2, 3, 4, 1]),
        (5, [(1, 2), (3, 2), (5, 2)], [2, 3, 4, 5, 6]),
        (5, [(1, 2), (3, 2), (5, 2), (7, 5)], [7, 8, 9, 10, 11]),
        (3, [(1, 7), (11, 7)], [11, 12, 13]),  # the first of a large batch
        (4, [(1, 4, (1,))], [1, 3, 4, 1]),  # without bad samples
        (4, [(1, 4, (1,)), (5, 6, (0, 2, 3, 5))], [3, 4, 6, 9]),
    ],
)
def test_queue_keeps_the_most_recent_in_order_and_repeats_what_is_there(
    capacity: int, batches: list[Any], contents: list[float]
) -> None:
    queue = EmbeddingQueue(capacity, 2)
    for batch in batches:
        queue.push(_numbered(*batch))
    assert _contents(queue) == contents


@pytest.mark.parametrize("pushes", [[2], [2, 2], [2, 2, 2], [7], [5, 1]])
def test_multiplicity_counts_the_repetitions(pushes: list[int]) -> None:
    queue = EmbeddingQueue(5, 2)
    for number, size in enumerate(pushes):
        queue.push(_numbered(10 * number + 1, size))
    times = queue.multiplicity().tolist()
    contents = _contents(queue)
    assert times == [contents.count(value) if value else 0 for value in queue.rows[1, :, 0].tolist()]


@pytest.mark.parametrize("number", [2, 4, 9])
def test_a_batchs_repetition_is_that_of_a_fresh_queue(number: int) -> None:
    batch = _numbered(1, 4, bad=(2,))
    queue = EmbeddingQueue(number, 2)
    queue.push(batch)
    assert torch.equal(repeated_batch(batch, number), queue.repeated())


def test_restart_takes_the_batch_in_order_and_forgets_the_accumulators() -> None:
    loss = create_loss("neuclip", embed_dim=WIDTH, prototypes=6, restart_every=2, normalizer_updates=1)
    steps = make_steps(3)
    run_step(loss, steps[0])
    accumulated = loss.normalizer.accumulator.clone()
    run_step(loss, steps[1])
    assert (loss.normalizer.accumulator >= accumulated).all()
    with torch.no_grad():
        loss.normalizer.lr = 0.0
    run_step(loss, steps[2])
    expected = torch.stack([steps[2].texts, steps[2].images])
    assert torch.equal(loss.normalizer.prototypes, expected)


def test_prototypes_predict_only_after_they_predicted_better_than_recent_embeddings() -> None:
    options = {"embed_dim": WIDTH, "prototypes": 12, "restart_every": 4, "normalizer_updates": 3, "normalizer_lr": 0.3}
    loss = create_loss("neuclip", **options, verify_fit=True).double()
    recent = create_loss("neuclip", **options | {"restart_every": 1, "normalizer_updates": 0}).double()
    scale = torch.tensor(10.0)
    used = []
    # The same batch again and again: after the first fit the prototypes know it best, but not in a step of a restart.
    for step in [make_steps(1)[0]] * 8:
        step.logit_scale = scale.item()
        run_step(loss, step)
        run_step(recent, step)
        used.append(loss.metrics()["uses_fit"])
        prediction, other = (
            torch.stack(each.log_normalizers(step.images, step.texts, scale)) for each in (loss, recent)
        )
        assert torch.allclose(prediction, other) == (not used[-1])
    assert used == [0, 1, 1, 1, 0, 1, 1, 1]


def test_a_destroyed_fit_is_not_used() -> None:
    steps = make_steps(6)
    options = {"prototypes": 12, "restart_every": None, "normalizer_lr": 0.1, "verify_fit": True}
    fitted = create_loss("neuclip", embed_dim=WIDTH, **options)
    for step in steps[:5]:
        run_step(fitted, step)
    with torch.no_grad():
        fitted.normalizer.prototypes.copy_(fitted.normalizer.prototypes[:, :1].expand(-1, 12, -1))
    steps[5].logit_scale = 50.0
    run_step(fitted, steps[5])
    assert fitted.metrics()["uses_fit"] == 0.0


def test_queue_bounds_the_weights() -> None:
    for weight, bound in ((0.5, 2.0), (0.25, 4.0)):
        loss = create_loss("queueclip", embed_dim=WIDTH, prototypes=12, batch_weight=weight)
        for step in make_steps(4):
            step.logit_scale = 100.0
            run_step(loss, step)
            alpha = torch.stack(loss.log_normalizers(step.images, step.texts, torch.tensor(100.0)))
            batch = create_loss("queueclip", embed_dim=WIDTH, normalizer="minibatch")
            estimate = torch.stack(batch.log_normalizers(step.images, step.texts, torch.tensor(100.0)))
            assert ((estimate - alpha).exp() <= bound * (1 + 1e-6)).all()


def test_prototypes_learn_the_normalizers_of_a_fixed_batch() -> None:
    loss = create_loss(
        "neuclip",
        embed_dim=WIDTH,
        prototypes=6,
        restart_every=None,
        normalizer_updates=100,
        normalizer_lr=0.1,
        verify_fit=False,
    ).double()
    step = make_steps(1)[0]
    batch = create_loss("neuclip", embed_dim=WIDTH, normalizer="minibatch").double()
    scale = torch.tensor(step.logit_scale)
    exact = torch.stack(batch.log_normalizers(step.images, step.texts, scale))

    def error() -> float:
        alpha = torch.stack(loss.log_normalizers(step.images, step.texts, scale))
        return (alpha - exact).square().mean().item()

    before = error()
    run_step(loss, step)
    assert error() < 0.05 * before


def test_mlp_learns_the_partition_function_of_a_fixed_batch() -> None:
    loss = create_loss(
        "amorlip",
        embed_dim=WIDTH,
        normalizer_updates=600,
        normalizer_lr=0.01,
        fit_every=1,
        ema_decay=0.0,
        target_every=1,
    ).double()
    step = make_steps(1)[0]
    scale = torch.tensor(step.logit_scale)
    run_step(loss, step)
    alpha = torch.stack(loss.log_normalizers(step.images, step.texts, scale))
    logits = step.logit_scale * step.images @ step.texts.T
    exact = torch.stack([logits.logsumexp(1), logits.logsumexp(0)]) - torch.tensor(6.0).log() - logits.diagonal()
    assert (alpha - exact).square().mean() < 0.01


def test_mlp_starts_as_torchs_linear_layers_do() -> None:
    mlp = TwoSidedMlp(64, 0.5)
    mlp.initialize(torch.Generator().manual_seed(0))
    linear = torch.nn.Linear(64, 32)
    for side in (0, 1):
        assert mlp.weights[0][side].abs().max() <= 1 / 8
        assert mlp.weights[0][side].std().item() == pytest.approx(linear.weight.std().item(), rel=0.1)
    assert not torch.equal(mlp.weights[0][0], mlp.weights[0][1])


def test_networks_depend_on_the_seed_and_on_nothing_else() -> None:
    torch.manual_seed(1)
    first = create_loss("amorlip", embed_dim=WIDTH, seed=3).state_dict()
    torch.manual_seed(2)
    second = create_loss("amorlip", embed_dim=WIDTH, seed=3).state_dict()
    other = create_loss("amorlip", embed_dim=WIDTH, seed=4).state_dict()
    key = "normalizer.online.weights.0"
    assert torch.equal(first[key], second[key])
    assert not torch.equal(first[key], other[key])


def test_short_epochs_are_warned_of_once() -> None:
    loss = create_loss("amorlip", embed_dim=WIDTH)
    for number, step in enumerate(make_steps(3)):
        step.epoch = number
        if number == 1:
            with pytest.warns(UserWarning, match=r"the last epoch had 1 steps.*reinitialize=False"):
                loss.start_epoch(number)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            run_step(loss, step)
    quiet = create_loss("amorlip", embed_dim=WIDTH, reinitialize=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for number, step in enumerate(make_steps(3)):
            step.epoch = number
            run_step(quiet, step)
