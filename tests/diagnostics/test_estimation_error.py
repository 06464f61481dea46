"""The estimation error: exact log-normalizers equal a naive computation, and errors are computed from them correctly."""

import json
import runpy
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn.functional import mse_loss

from openclip_ext.cli.errors import UsageError
from openclip_ext.contrastive.global_loss import GlobalContrastiveLoss
from openclip_ext.contrastive.normalizer import MinibatchNormalizer
from openclip_ext.contrastive.temperature import ConstantTemperature
from openclip_ext.diagnostics import estimation_error
from openclip_ext.diagnostics.estimation_error import exact_log_normalizers, measure
from openclip_ext.diagnostics.finished_run import embed_training_set, load_run
from openclip_ext.losses.registry import create_loss
from tests.references import contrastive as reference
from tests.training.runs import NUM_SAMPLES, command, make_shards, run, run_on_two_ranks, small_command

SAMPLES, WIDTH, EPS = 23, 6, 1e-3


def make_embeddings() -> tuple[torch.Tensor, torch.Tensor]:
    pair = torch.randn(2, SAMPLES, WIDTH, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    images, texts = torch.nn.functional.normalize(pair, dim=2)
    return images, texts


@pytest.mark.parametrize("include_positive", [None, 8])
@pytest.mark.parametrize("chunk", [1, 7, 100])
def test_exact_log_normalizers_are_the_naive_ones(monkeypatch, chunk, include_positive):
    monkeypatch.setattr(estimation_error, "_CHUNK", chunk)
    images, texts = make_embeddings()
    anchors = [22, 0, 7, 6, 13]
    # The smallest temperature is 0.005, at which exp(s/τ) exceeds the range of float32 and nearly that of float64.
    tau = torch.linspace(0.005, 0.5, 10, dtype=torch.float64).reshape(2, 5)
    eps = EPS if include_positive is None else 0.0
    expected = reference.exact_log_normalizers(images.float(), texts.float(), anchors, tau, eps, include_positive)
    for rows in (anchors, [row - len(images) for row in anchors]):  # negative rows count from the end
        found = exact_log_normalizers(
            images.float().numpy(), texts.float(), rows, tau, eps=eps, include_positive=include_positive
        )
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


def test_a_batchs_own_estimate_is_the_baseline():
    images, texts = make_embeddings()
    loss = create_loss("neuclip-paper", embed_dim=WIDTH, normalizer="minibatch", eps=EPS)
    # 9 anchors in batches of 4: 3 more anchors fill the last batch.
    result = measure(loss, images, texts, 10.0, batch_size=4, anchors=9, seed=3)
    order = torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(3))[:12]
    tau = torch.full((2, 12), 0.1, dtype=torch.float64)
    exact = reference.exact_log_normalizers(images, texts, order.tolist(), tau, EPS)
    parts = [
        reference.exact_log_normalizers(images[rows], texts[rows], range(4), tau[:, :4], EPS) for rows in order.split(4)
    ]
    expected = mse_loss(torch.cat(parts, dim=1)[:, :9], exact[:, :9]).item()
    assert result.minibatch.mean == pytest.approx(expected, rel=1e-9)
    assert result.estimator.mean == pytest.approx(expected, rel=1e-9)
    assert (result.anchors, result.samples, result.batch_size) == (9, SAMPLES, 4)
    assert measure(create_loss("openclip"), images, texts, 10.0, batch_size=4).estimator is None


def train_on_batches(loss: torch.nn.Module, images: torch.Tensor, texts: torch.Tensor, index: torch.Tensor) -> None:
    scale = torch.tensor(10.0, dtype=images.dtype)
    for rows in torch.arange(SAMPLES).split(8):
        loss(images[rows], texts[rows], scale, index=index[rows])


def test_stored_averages_and_temperatures_belong_to_the_index():
    """The indices have gaps, as if some samples could not be decoded, and each anchor has its own stored temperature."""
    images, texts = make_embeddings()
    index = torch.arange(SAMPLES) * 2 + 1
    loss = create_loss("isogclr", num_samples=50, eps=EPS).double()
    train_on_batches(loss, images, texts, index)
    tau = torch.linspace(0.05, 0.5, 2 * SAMPLES, dtype=torch.float64).reshape(2, SAMPLES)
    loss.temperature.table.values[:2, index] = tau
    before = {name: value.clone() for name, value in loss.state_dict().items() if isinstance(value, torch.Tensor)}
    result = measure(loss, images, texts, 10.0, batch_size=8, index=index, anchors=SAMPLES)
    assert result.temperature == pytest.approx(tau.median().item())
    after = loss.state_dict()
    assert all(torch.equal(value.nan_to_num(), after[name].nan_to_num()) for name, value in before.items())
    stored = loss.normalizer.table.values[:, index]
    expected = reference.exact_log_normalizers(images, texts, range(SAMPLES), tau, EPS)
    assert result.estimator.mean == pytest.approx(mse_loss(stored, expected).item(), rel=1e-9)
    assert result.estimator.image == pytest.approx(mse_loss(stored[0], expected[0]).item(), rel=1e-9)
    assert result.estimator.text == pytest.approx(mse_loss(stored[1], expected[1]).item(), rel=1e-9)
    assert result.estimator.bias == pytest.approx((stored - expected).mean().item(), rel=1e-9)


def test_amorlip_is_compared_with_the_positive_pair_inside():
    images, texts = make_embeddings()
    loss = create_loss("amorlip", embed_dim=WIDTH, ema_decay=0.0, fit_every=1, target_every=1).double()
    train_on_batches(loss, images, texts, torch.arange(SAMPLES))
    result = measure(loss, images, texts, 10.0, batch_size=8, anchors=SAMPLES)
    tau = torch.full((2, SAMPLES), 0.1, dtype=torch.float64)
    exact = reference.exact_log_normalizers(images, texts, range(SAMPLES), tau, 0.0, batch=8)
    predicted = loss.normalizer.target(torch.stack([images, texts])).detach() - (images * texts).sum(dim=1) * 10
    assert result.estimator.mean == pytest.approx(mse_loss(predicted, exact).item(), rel=1e-9)
    # If the batch is the full data set, the mini-batch estimate (with the positive pair) is exact.
    assert measure(loss, images, texts, 10.0, batch_size=SAMPLES).minibatch.mean < 1e-20


def test_another_quantity_is_not_compared():
    """The α of the example loss ``decoupled`` is ``log(N·g)``, which differs from ``log(ε + g)`` by ``log N``."""
    images, texts = make_embeddings()
    example = Path(__file__).parents[2] / "examples/add_a_loss/openclip_ext/losses/decoupled.py"
    objective = runpy.run_path(str(example))["DecoupledContrastive"]()
    loss = GlobalContrastiveLoss(objective, MinibatchNormalizer(), ConstantTemperature(temperature=None), None, None)
    result = measure(loss, images, texts, 10.0, batch_size=8)
    assert result.estimator is None
    assert result.minibatch == measure(create_loss("openclip"), images, texts, 10.0, batch_size=8).minibatch


def test_wrong_input_is_named():
    images, texts = make_embeddings()
    for name, given, batch_size, message in (
        ("openclip", (images, texts), SAMPLES + 1, "expected from 2 to the number of samples, 23"),
        ("openclip", (images * torch.nan, texts), 8, "23 of 46 embeddings are not finite"),
        ("openclip", (images, texts * 3), 8, "expected rows of unit norm, found norms from 1 to 3"),
        ("siglip", (images, texts), 8, "has no log-normalizers of images against texts"),
    ):
        with pytest.raises(ValueError, match=message):
            measure(create_loss(name), *given, 10.0, batch_size=batch_size)
    with pytest.raises(ValueError, match="logit_scale=-1: expected 1/temperature"):
        measure(create_loss("openclip"), images, texts, -1.0, batch_size=8)
    for name in ("sogclr", "openclip"):
        masked = create_loss(name, num_samples=SAMPLES, equal_captions="mask")
        with pytest.raises(ValueError, match="equal_captions=mask or positive is not supported"):
            measure(masked, images, texts, 10.0, batch_size=8)


# --- the command, on a run --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def fastclip(shards, tmp_path_factory):
    """Return the folder of a run on two ranks; each rank saved its half of the moving averages."""
    logs = tmp_path_factory.mktemp("two_ranks")
    run_on_two_ranks(command(shards, logs, "run", "fastclip", "--batch-size", "8"))
    return logs / "run"


@pytest.mark.parametrize("name", ["latest", "epoch_1.pt"])
def test_the_program_measures_a_run_of_several_ranks(fastclip, tmp_path, capsys, name):
    estimation_error.main([str(fastclip), "--checkpoint", name, "--json", str(tmp_path / "out.json")])
    result = json.loads((tmp_path / "out.json").read_text())
    printed = capsys.readouterr().out
    assert f"{result['estimator']['mean']:.4f}" in printed
    assert f"{result['minibatch']['mean']:.4f}" in printed
    checkpoint = "epoch_2.pt" if name == "latest" else name
    assert (result["checkpoint"], result["loss"], result["batch_size"]) == (checkpoint, "fastclip", 16)
    assert (result["samples"], result["anchors"]) == (NUM_SAMPLES, NUM_SAMPLES)

    embeddings = embed_training_set(load_run(fastclip, checkpoint))
    assert embeddings.index.tolist() == list(range(NUM_SAMPLES))
    assert embeddings.logit_scale == pytest.approx(1 / result["temperature"])
    parts = sorted((fastclip / "checkpoints" / checkpoint).with_suffix(".state").glob("*/rank_*.normalizer.table.npy"))
    assert len(parts) == 2
    stored = torch.cat([torch.from_numpy(np.load(part)).T for part in parts], dim=1)
    seen = (~stored.isnan()).all(dim=0).nonzero().squeeze(1).tolist()
    tau = torch.full((2, len(seen)), result["temperature"], dtype=torch.float64)
    exact = reference.exact_log_normalizers(embeddings.image, embeddings.text, seen, tau, 1e-14)
    expected = (stored[:, seen].double() - exact).square().sum().item() / (2 * NUM_SAMPLES)
    if name == "latest":
        assert len(seen) == NUM_SAMPLES
        assert result["estimator"]["mean"] == pytest.approx(expected, rel=1e-4)
    else:
        # The first epoch drops four samples. They have no stored value, so the mini-batch estimate is used for them.
        assert len(seen) == NUM_SAMPLES - 4
        assert expected < result["estimator"]["mean"] < expected + 0.1


def test_several_checkpoints_are_measured_in_order_and_drawn(fastclip, tmp_path, capsys):
    written, drawn = tmp_path / "out.json", tmp_path / "out.svg"
    more = ["--checkpoint", "all", "--anchors", "9", "--json", str(written), "--plot", str(drawn)]
    estimation_error.main([str(fastclip), *more])
    found = json.loads(written.read_text())
    assert [(one["checkpoint"], one["samples_seen"]) for one in found] == [("epoch_1.pt", 80), ("epoch_2.pt", 160)]
    assert "epoch_1.pt" in capsys.readouterr().out and "samples seen" in drawn.read_text()


def test_all_checkpoints_are_sorted_by_age(tmp_path):
    names = ["epoch_1.pt", "epoch_2_step_9.pt", "epoch_10.pt", "epoch_latest.pt"]
    for name in names:
        (tmp_path / "checkpoints" / name).with_suffix(".state").mkdir(parents=True)
        (tmp_path / "checkpoints" / name).touch()
    assert estimation_error.checkpoints_of(tmp_path, "all") == names


def test_the_program_reads_runs_of_networks(shards, tmp_path, capsys):
    assert run(command(shards, tmp_path, "run", "neuclip", "--epochs", "1")) == 0
    estimation_error.main([str(tmp_path / "run"), "--anchors", "20", "--workers", "1", "--batch-size", "50"])
    assert "20 images and their texts as anchors, 84 samples, batches of 16" in capsys.readouterr().out
    more = ("--epochs", "2", "--batch-size", "28", "--resume", "latest")
    assert run(command(shards, tmp_path, "run", "neuclip", *more)) == 0
    estimation_error.main([str(tmp_path / "run"), "--json", str(tmp_path / "out.json")])
    assert json.loads((tmp_path / "out.json").read_text())["samples_seen"] == 5 * 16 + 3 * 28


@pytest.mark.parametrize("more", [[], ["--lora-rank", "2"]])
def test_an_average_of_the_weights_is_not_measured(shards, tmp_path, more):
    found = []
    for name, average in (("plain", []), ("averaged", ["--model-ema-decay", "0.9"])):
        assert run(small_command(shards, tmp_path, name, "fastclip", *more, *average, "--epochs", "1")) == 0
        estimation_error.main([str(tmp_path / name), "--json", str(tmp_path / "out.json")])
        found.append(json.loads((tmp_path / "out.json").read_text())["estimator"])
    assert found[0] == pytest.approx(found[1], rel=1e-4)


def test_errors_say_what_is_missing(fastclip, tmp_path, shards):
    other = make_shards(tmp_path / "other").replace("{00000..00006}", "{00000..00001}")
    single = shutil.copytree(fastclip, tmp_path / "single")
    config = (
        (single / "config.json").read_text().replace('"single_source_batches": false', '"single_source_batches": true')
    )
    (single / "config.json").write_text(config)
    for folder, flag, value, message in (
        (single, "--checkpoint", "epoch_2.pt", "was trained with --single-source-batches"),
        (tmp_path, "--checkpoint", "latest", "has no config.json"),
        (tmp_path, "--checkpoint", "all", r"has a \.state folder"),
        (fastclip, "--checkpoint", "epoch_9.pt", "epoch_9.pt not found"),
        (fastclip, "--train-data", other, "expected the run's 84 samples, found 24"),
    ):
        with pytest.raises(UsageError, match=message):
            estimation_error.main([str(folder), flag, value])
