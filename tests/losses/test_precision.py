"""Small temperatures, half precision, autocast, and the dtype of the state."""

import copy

import pytest
import torch

from openclip_ext.contrastive.loop_checks import CHECKED_CALLS
from tests.devices import all_on_a_gpu, refusing_to_wait
from tests.losses.cases import CASES, create_any, kinds, make_steps, run_step
from tests.references.contrastive import equal_captions

# With an untrained network at τ = 0.01, AmorLIP's exact weights exceed float32 and saturate (see the test below).
# AdaGrad's first steps with learning rate 1.0 depend only on the gradients' signs. This amplifies float32 rounding errors.
_AMPLIFYING = {name for name in CASES if name.startswith("neuclip")} - {
    "neuclip-simultaneous",
    "neuclip-keep-accumulators",
}
_TAME = [name for name in kinds() if not name.startswith("amorlip") and name not in _AMPLIFYING]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", _TAME)
def test_smallest_temperature_in_half_precision(name: str, dtype: torch.dtype) -> None:
    loss = CASES[name].create()
    reference = CASES[name].reference(loss.double())
    loss.float()
    for step in make_steps(1 if name == "neuclip-simultaneous" else 4):
        # A half-precision model returns features with this precision.
        step.images, step.texts = (features.to(dtype).double() for features in (step.images, step.texts))
        step.logit_scale = 100.0
        with equal_captions(CASES[name].options.get("equal_captions", "negative"), step.labels):
            expected = reference.step(step.images, step.texts, step.logit_scale, step.index, step.epoch)
        value, (images, texts, logit_scale) = run_step(loss, step, dtype)
        assert value.dtype == torch.float32
        assert images.dtype == texts.dtype == dtype
        tolerance = 2e-4
        assert value.item() == pytest.approx(expected.value, rel=tolerance, abs=tolerance)
        assert logit_scale.item() == pytest.approx(expected.logit_scale, rel=10 * tolerance, abs=tolerance)
        for actual, wanted in ((images, expected.images), (texts, expected.texts)):
            if wanted.abs().max() > torch.finfo(dtype).max:
                continue
            error = (actual.double() - wanted).norm() / wanted.norm()
            assert error < {torch.float32: 10 * tolerance, torch.float16: 0.02, torch.bfloat16: 0.02}[dtype]


@pytest.mark.parametrize("name", [*kinds(), "cliplite"])
def test_autocast_changes_nothing(name: str) -> None:
    plain, cast = create_any(name), create_any(name)
    for step in make_steps(3):
        expected = run_step(plain, step, torch.float32)
        torch.testing.assert_close(run_step(cast, step, torch.float32, torch.bfloat16), expected, rtol=0, atol=0)
    if name == "cliplite":
        return
    sample = step.images.float(), step.texts.float(), torch.tensor(step.logit_scale), torch.tensor(step.index)
    for of_loss in ("log_normalizers", "anchor_temperatures"):
        with torch.autocast("cpu", torch.bfloat16):
            found = getattr(cast, of_loss)(*sample)
        torch.testing.assert_close(found, getattr(plain, of_loss)(*sample), rtol=0, atol=0)


@pytest.mark.parametrize("name", kinds())
def test_wrong_estimates_saturate_instead_of_overflowing(name: str) -> None:
    loss = CASES[name].create()
    for step in make_steps(4, seed=5):
        step.logit_scale = 100.0
        step.texts.neg_()
        value, gradients = run_step(loss, step, torch.float32)
        assert torch.isfinite(value)
        assert all(torch.isfinite(gradient).all() for gradient in gradients)
    assert not any(torch.isinf(value).any() for value in loss.state_dict().values())


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", kinds())
def test_a_training_call_in_inference_mode_and_a_state_in_float16(name: str) -> None:
    """The call updates the state as it does outside of inference mode. A state in half precision can be loaded."""
    expected, loss = create_any(name), create_any(name)
    for step in make_steps(2):
        run_step(expected, step, torch.float32)
        with torch.inference_mode():
            loss.start_epoch(step.epoch)
            features = step.images.float(), step.texts.float()
            positives = {"positives": torch.tensor(step.labels)} if loss.needs_positives else {}
            loss(*features, torch.tensor(step.logit_scale), index=torch.tensor(step.index), **positives)
    torch.testing.assert_close(loss.state_dict(), expected.state_dict(), rtol=0, atol=0, equal_nan=True)
    create_any(name).load_state_dict(loss.half().state_dict())


@pytest.mark.parametrize("name", kinds())
def test_a_default_dtype_of_half_precision_does_not_round_the_state(name: str) -> None:
    """Lightning sets this dtype with precision="bf16-true" when it calls ``configure_model``."""
    torch.manual_seed(0)
    expected = create_any(name)
    torch.set_default_dtype(torch.bfloat16)
    try:
        torch.manual_seed(0)
        loss = create_any(name)
    finally:
        torch.set_default_dtype(torch.float32)
    torch.testing.assert_close(loss.state_dict(), expected.state_dict(), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("name", kinds())
def test_double_features_make_the_state_double(name: str) -> None:
    explicit, implicit = CASES[name].create().double(), CASES[name].create()
    for step in make_steps(3):
        expected, _ = run_step(explicit, step)
        value, _ = run_step(implicit, step)
        assert value.dtype == torch.float64
        assert torch.equal(value, expected)
    state = [*explicit.state_dict().values(), *implicit.state_dict().values()]
    assert {value.dtype for value in state if value.is_floating_point()} <= {torch.float64}


@pytest.mark.parametrize(
    ("name", "device"), all_on_a_gpu([(name,) for name in (*kinds(), "cliplite")], [("neuclip-mask",), ("cliplite",)])
)
def test_gpu_has_the_same_results_without_a_sync(
    name: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_cpu, on_gpu = create_any(name).double(), create_any(name).double().to(device)
    # Random numbers of dropout differ between devices.
    monkeypatch.setattr(torch, "rand", lambda shape, device, **_: torch.ones(shape, device=device))
    for number, step in enumerate(make_steps(4)):
        results = []
        inputs = step.images, step.texts, torch.tensor(step.logit_scale, dtype=torch.float64)
        for loss, where in ((on_cpu, torch.device("cpu")), (on_gpu, device)):
            loss.start_epoch(step.epoch)
            leaves = [value.to(where, copy=True).requires_grad_() for value in inputs]
            named = {"index": torch.tensor(step.index, device=where)}
            if loss.needs_positives:
                named["positives"] = torch.tensor(step.labels, device=where)
            parameters = list(loss.parameters()) if loss.model_head() is not None else []
            # The first calls check the loop, which synchronizes.
            with refusing_to_wait(where if number >= CHECKED_CALLS else torch.device("cpu")):
                value = loss(*leaves, **named)
                gradients = torch.autograd.grad(value, (*leaves, *parameters), allow_unused=True)
            results.append([value, *(gradient for gradient in gradients if gradient is not None)])
        for actual, expected in zip(results[1], results[0], strict=True):
            torch.testing.assert_close(actual.cpu(), expected, rtol=1e-7, atol=1e-9)


compiles_to_one_graph = pytest.mark.skipif(
    torch.__version__ < "2.14",
    reason="torch before 2.14 compiles a loss into several graphs",
)


# Only one loss of each kind, because compiling takes seconds.
@compiles_to_one_graph
@pytest.mark.parametrize(
    "name",
    ["openclip", "simclr", "fastclip", "isogclr", "tempnet", "neuclip", "amorlip", "queueclip", "scent", "cliplite"],
)
def test_training_compiles_to_one_graph_for_all_steps(name: str) -> None:
    torch._dynamo.reset()
    plain = create_any(name).double()
    wrapped = copy.deepcopy(plain)
    compiled = torch.compile(wrapped, backend="eager", fullgraph=True)
    torch._dynamo.utils.counters.clear()
    for step in make_steps(12):
        trained = step.images, step.texts, torch.tensor(step.logit_scale)
        results = []
        for loss, call in ((plain, plain), (wrapped, compiled)):
            loss.start_epoch(step.epoch)
            inputs = [value.clone().requires_grad_() for value in trained]
            value = call(*inputs, torch.tensor(-10.0), torch.tensor(step.index))
            results.append([value, *torch.autograd.grad(value, inputs, allow_unused=True)])
        torch.testing.assert_close(*results, rtol=0, atol=1e-12)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    assert (wrapped.calls, wrapped.epoch) == (plain.calls, plain.epoch)
    torch.testing.assert_close(wrapped.state_dict(), plain.state_dict(), rtol=1e-12, atol=1e-12, equal_nan=True)
