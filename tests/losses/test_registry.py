"""The registry of losses: names, options, combinations of parts, and error messages."""

import itertools
import math
import runpy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import openclip_ext
from openclip_ext.cli.options import OptionError
from openclip_ext.contrastive.batch import ContrastStats, GatheredBatch
from openclip_ext.contrastive.global_loss import GlobalContrastiveLoss
from openclip_ext.contrastive.normalizer import MinibatchNormalizer
from openclip_ext.contrastive.temperature import ConstantTemperature, TemperatureScheme
from openclip_ext.losses import registry
from openclip_ext.losses.method import Method, NormalizerPart, Scaled, TemperaturePart, option
from openclip_ext.losses.options import NEUCLIP, OPTIONS, Constant, Minibatch, MovingAverage
from openclip_ext.losses.registry import (
    check_options,
    create_loss,
    find_method,
    list_losses,
    options_used_by,
    register_method,
    run_defaults,
)
from tests.losses.cases import SAMPLES, WIDTH, make_steps, restore_registry, run_step

COMPOSED = [name for name in list_losses() if "normalizer" in options_used_by(name)]
# One loss per objective, tested with all combinations of parts. For other losses, one part is always the default part.
OF_EACH_OBJECTIVE = ("fastclip", "fastclip-v0", "neuclip", "amorlip")


@pytest.mark.parametrize("name", list_losses())
def test_every_loss_works_with_its_defaults(name: str) -> None:
    loss = openclip_ext.create_loss(name, embed_dim=WIDTH, num_samples=SAMPLES)
    in_optimizer = {*loss.model_head().parameters()} if loss.model_head() else set()
    assert {value for value in loss.parameters() if value.requires_grad} == in_optimizer
    step = make_steps(1)[0]
    bias = torch.tensor(-10.0, dtype=torch.float64) if loss.initial_logit_bias is not None else None
    scale = torch.tensor([step.logit_scale], requires_grad=True)
    terms = loss(step.images, step.texts, scale, logit_bias=bias, index=torch.tensor(step.index), output_dict=True)
    total = loss.eval()(step.images, step.texts, scale, logit_bias=bias, index=torch.tensor(step.index))
    assert terms.keys() <= {"contrastive_loss", "temperature_loss"}
    assert all(value.shape == () for value in (*terms.values(), total))
    sum(terms.values()).backward() if loss.learns_logit_scale else None
    assert (scale.grad is not None) == loss.learns_logit_scale
    metrics = loss.metrics()
    assert {"infonce", "chance", "temperature_min", "temperature_median", "temperature_max"} <= metrics.keys()
    assert all(isinstance(value, float) for value in metrics.values())
    assert loss.normalizers_include_positive == (name == "amorlip")
    assert metrics["chance"] == pytest.approx(math.log({1: 6, 2: 11}[loss.views]))


@pytest.mark.parametrize("name", COMPOSED)
def test_infonce_is_openclips_loss(name: str) -> None:
    loss = create_loss(name, embed_dim=WIDTH, num_samples=SAMPLES)
    if loss.temperature.learns_own:
        pytest.skip("this loss reports InfoNCE at its own temperatures")
    step = make_steps(1)[0]
    run_step(loss, step)
    reference = create_loss("openclip")
    expected = reference(step.images, step.texts, torch.tensor(1 / loss.metrics()["temperature_median"]))
    assert loss.metrics()["infonce"] == pytest.approx(expected.item(), rel=1e-6)


def test_every_option_of_a_loss_is_in_the_table_and_every_one_is_used() -> None:
    used = options_used_by("neuclip", normalizer="mlp", temperature_scheme="solved", steer=True).keys()
    for name in list_losses():
        options = options_used_by(name)
        create_loss(name, embed_dim=WIDTH, num_samples=SAMPLES, **options)
        used |= options.keys()
    assert used == OPTIONS.keys()


def test_unknown_loss_lists_the_names() -> None:
    with pytest.raises(ValueError, match=rf"unknown loss 'neuclp'.*{', '.join(list_losses())}.*did you mean neuclip"):
        create_loss("neuclp")


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("neuclip", {"gamma": 0.5}, r"gamma=: not used by the loss 'neuclip', only with normalizer="),
        ("openclip", {"temperature_scheme": "constant", "local_loss": True}, "local_loss=: not used by .* 'openclip"),
        ("siglip", {"temperature_scheme": "constant"}, "temperature_scheme=: not used by the loss 'siglip'"),
        ("fastclip", {"normalizer": "average"}, "normalizer='average': expected one of minibatch, mlp"),
        ("fastclip", {"gamma": 1.5}, r"gamma=1.5: expected a number >= 0, at most 1"),
        ("neuclip", {"rho": -5, "temperature_scheme": "solved"}, "rho=-5: expected at least 0, .* never negative"),
        ("fastclip", {"temperature": 14.3}, "temperature=14.3: expected a temperature from 0.01 to 1"),
        ("amorlip", {"rho_switch": 0.3, "rho_end": None}, "rho_switch=: no effect without rho_end="),
        (
            "fastclip",
            {"temperature": 0.05, "temperature_min": 0.2},
            "temperature=0.05: expected a temperature from 0.2 to 1",
        ),
        ("neuclip", {"prototypes": torch.tensor(2.5)}, r"prototypes=tensor\(2.5000\): expected an integer >= 1"),
        ("neuclip", {"prototypes": np.float32("inf")}, "prototypes=.*inf.*: expected an integer >= 1"),
        ("neuclip", {"alpha_gradient": 1}, "alpha_gradient=1: expected True or False"),
        ("neuclip", {"normalizer_objective": "kl"}, "prototypes support unified or l2-log"),
        ("fastclip", {"temperature_min": 0.5, "temperature_max": 0.1}, "temperature_min=0.5 is larger than"),
        ("isogclr", {"temperature": None}, "temperature=None: expected a number for per-sample temperatures"),
        ("tempnet", {"rho": -1.0}, "rho=-1.0"),
        ("amorlip", {"normalizer": "queue"}, r"needs an estimate of log\(\(1.*Losses that take these parts: .*neuclip"),
        ("amorlip", {"temperature_scheme": "predicted"}, "use each process's own batch"),
        ("queueclip", {"leave_own_out": True, "prototypes": 1}, "leave_own_out=True needs prototypes >= 2"),
        ("amorlip", {"equal_captions": "positive"}, "only one positive pair"),
        ("siglip", {"equal_captions": "mask"}, "equal_captions=: not used by the loss 'siglip'"),
        ("sogclr", {"equal_captions": "mask", "views": 2}, "not used by the loss 'sogclr with views=2'"),
        ("fastclip-v0", {"normalizer": "prototypes"}, "treats α as constant.*Losses that take .*fastclip-v3"),
    ],
)
def test_wrong_options_are_named(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message) as error:
        create_loss(name, embed_dim=WIDTH, num_samples=SAMPLES, **options)
    assert error.value.option in options
    with pytest.raises(OptionError, match=message):
        check_options(name, **options)


def test_a_reference_model_needs_a_loss_of_parts_and_its_width() -> None:
    with pytest.raises(OptionError, match="a reference model: not used by the loss 'siglip'"):
        create_loss("siglip", reference_dim=8)
    with pytest.raises(OptionError, match="reference_dim=0: expected an integer >= 1"):
        create_loss("queueclip", embed_dim=WIDTH, reference_dim=0)
    with pytest.raises(OptionError, match="distill= needs a reference model: set reference_dim="):
        create_loss("fastclip", num_samples=SAMPLES, distill=1.0)


@pytest.mark.parametrize(
    ("name", "options", "needed"),
    [
        ("openclip", {}, []),
        ("sogclr", {"views": 2}, ["embed_dim", "num_samples"]),
        ("simclr", {}, ["embed_dim"]),
        ("fastclip", {}, ["num_samples"]),
        ("neuclip", {}, ["embed_dim"]),
        ("tempnet", {}, ["embed_dim", "num_samples"]),
    ],
)
def test_missing_sizes_are_errors(name: str, options: dict[str, Any], needed: list[str]) -> None:
    loss = check_options(name, **options)
    sizes = {"embed_dim": loss.embed_dim is not None, "num_samples": loss.needs_index}
    assert [size for size, is_needed in sizes.items() if is_needed] == needed
    for size in needed:
        for value, message in (
            (None, f"the loss '{name}.*' needs {size}="),
            (1.5, f"{size}=1.5: expected an integer >= 1"),
        ):
            with pytest.raises(ValueError, match=message):
                create_loss(name, **(options | dict.fromkeys(needed, WIDTH) | {size: value}))
    create_loss(name, **(options | dict.fromkeys(needed, float(WIDTH))))


def test_a_preset_is_its_parts() -> None:
    assert options_used_by("fastclip") == options_used_by("fastclip-v3")
    queue = options_used_by("neuclip", normalizer="queue", temperature_scheme="solved")
    assert queue == options_used_by("queueclip")
    assert "lr_tau" not in queue
    assert options_used_by("fastclip", normalizer="prototypes")["alpha_gradient"] is False
    assert options_used_by("neuclip")["alpha_gradient"] is True
    # A loss may change the defaults of its own parts. These defaults do not apply if another part is selected.
    assert options_used_by("fastclip", temperature_scheme="per-sample")["lr_tau"] == 0.0133
    assert options_used_by("neuclip", normalizer="mlp")["normalizer_lr"] == 1e-3


@pytest.mark.parametrize(
    ("name", "steps", "rate"),
    [
        ("neuclip-paper", 0, 1.25e-4),
        ("neuclip-paper", 99, 1.25e-4),
        ("neuclip-paper", 200, 5e-4),
        ("neuclip-paper", 2_750, math.log(0.07 / 0.03) / 2_750),
        ("neuclip-paper", 6_900, 1.25e-4),
        ("fastclip", 2_750, math.log(0.07 / 0.03) / 2_750),
        ("fastclip", 4_300, 2e-4),
        ("fastclip-v0", 2_750, None),
        ("queueclip", 2_750, None),
        ("openclip", 2_750, None),
    ],
)
def test_a_learned_temperature_has_a_larger_rate_in_a_short_run(name: str, steps: int, rate: float | None) -> None:
    sizes = {"embed_dim": WIDTH, "num_samples": SAMPLES, "steps": steps}
    assert create_loss(name, **sizes).logit_scale_lr == pytest.approx(rate)
    if rate is not None:
        assert create_loss(name, **sizes, lr_tau=1e-5).logit_scale_lr == 1e-5


def test_the_learning_rates_of_own_temperatures_do_not_depend_on_the_steps() -> None:
    assert run_defaults("isogclr", {}, steps=200)["lr_tau"] == 0.0133
    assert run_defaults("tempnet", {}, steps=200)["lr_tau"] == 3e-5


@pytest.mark.parametrize("name", COMPOSED)
def test_every_combination_works_or_is_rejected_with_a_reason(name: str) -> None:
    own = options_used_by(name)
    for normalizer, scheme in itertools.product(OPTIONS["normalizer"].choices, OPTIONS["temperature_scheme"].choices):
        parts = {"normalizer": normalizer, "temperature_scheme": scheme}
        if name not in OF_EACH_OBJECTIVE and not any(own[part] == choice for part, choice in parts.items()):
            continue
        try:
            loss = create_loss(name, embed_dim=WIDTH, num_samples=SAMPLES, **parts)
        except ValueError as error:
            assert find_method(name).objective is not None  # losses with the common objective accept all parts
            assert "Losses that take these parts" in str(error)
            continue
        for step in make_steps(3):
            value, gradients = run_step(loss, step, torch.float32)
            assert torch.isfinite(value)
            assert all(torch.isfinite(gradient).all() for gradient in gradients)
            assert gradients[0].any() and gradients[1].any()


# The example loss `decoupled` of docs/add-your-own-loss.md, whose objective has no regularizer and an estimand of its own.
_EXAMPLE = Path(__file__).parents[2] / "examples/add_a_loss/openclip_ext/losses/decoupled.py"
DECOUPLED: Method = runpy.run_path(str(_EXAMPLE))["METHOD"]
_OTHER_ESTIMAND = r"needs an estimate of log\(N·g\).*this normalizer estimates log\(ε \+ g\)|log\(\(1"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rho": 5.0}, "rho=: not used by the loss 'decoupled'"),
        ({"temperature_scheme": "per-sample"}, "decoupled with .*per-sample: the objective has no regularizer"),
        *(({"normalizer": name}, _OTHER_ESTIMAND) for name in ("prototypes", "queue", "mlp", "moving-average")),
    ],
)
def test_an_objective_takes_only_parts_that_fit(
    options: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(registry.METHODS, DECOUPLED.name, DECOUPLED)
    assert not {"rho", "rho_end", "rho_switch"} & options_used_by("decoupled").keys()
    with pytest.raises(OptionError, match=message):
        create_loss("decoupled", embed_dim=WIDTH, num_samples=SAMPLES, **options)


def test_parts_put_together_by_hand_are_checked_too() -> None:
    normalizer = create_loss("fastclip", num_samples=SAMPLES).normalizer
    with pytest.raises(ValueError, match=r"ConstantTemperature: .*needs an estimate of log\(N·g\)"):
        GlobalContrastiveLoss(
            DECOUPLED.objective_class()(), normalizer, ConstantTemperature(temperature=None), None, None
        )


@dataclass(frozen=True)
class _Own(Scaled):
    own: int = option(1, "x")


@pytest.fixture
def own_method(monkeypatch: pytest.MonkeyPatch) -> _Own:
    """Return a loss from outside of the package. Tests may register it, because the registry is restored afterwards."""
    restore_registry(monkeypatch)
    return _Own("own", Minibatch(), Constant())


def test_a_registered_method_is_a_loss_like_any_other(own_method: Method) -> None:
    openclip_ext.register_method(own_method)
    register_method(own_method)
    assert "own" in list_losses()
    assert options_used_by("own")["temperature_scheme"] == "constant"
    assert isinstance(create_loss("own"), openclip_ext.ContrastiveLoss)


def test_registered_names_must_be_free(own_method: Method) -> None:
    @dataclass(frozen=True)
    class Taken(Scaled):
        rho: int = option(1, "x")

    with pytest.raises(ValueError, match="already has a loss 'neuclip'"):
        register_method(replace(own_method, name="neuclip"))
    with pytest.raises(ValueError, match="option 'rho' of the loss 'own' already exists"):
        register_method(Taken("own", Minibatch(), Constant()))


def test_an_own_part_is_used_even_if_the_package_has_a_part_of_this_name(own_method: Method) -> None:
    class Own(MinibatchNormalizer):
        pass

    class OwnPart(NormalizerPart):
        name = "moving-average"
        module = Own

    register_method(replace(own_method, normalizer=OwnPart()))
    assert isinstance(create_loss("own", normalizer="moving-average").normalizer, Own)
    assert not isinstance(create_loss("fastclip", num_samples=SAMPLES).normalizer, Own)


def test_a_variant_changes_one_thing(own_method: Method) -> None:
    """A variant of a loss is its METHOD with another value, and may be registered under another name."""
    register_method(replace(NEUCLIP.with_options({"prototypes": 7}), name="few"))
    register_method(replace(NEUCLIP, name="averaged", normalizer=MovingAverage(gamma=0.5)))
    with pytest.raises(OptionError, match="did you mean normalizer_updates"):
        NEUCLIP.with_options({"normalizer_update": 5})
    changed = {"prototypes": 7}
    assert options_used_by("few") == options_used_by("neuclip") | changed
    assert create_loss("few", embed_dim=WIDTH).normalizer.prototypes.shape == (2, 7, WIDTH)
    assert options_used_by("averaged") == options_used_by("neuclip", normalizer="moving-average") | {"gamma": 0.5}


def test_a_step_uses_the_temperatures_before_their_update(own_method: Method) -> None:
    class Halved(TemperatureScheme):
        learns_own = True

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("tau", torch.tensor(0.5))

        def temperatures(self, batch: GatheredBatch) -> torch.Tensor:
            return self.tau.expand(2, batch.size)

        def update(self, stats: ContrastStats, gradient: torch.Tensor) -> None:
            self.tau.mul_(0.5)

    class HalvedPart(TemperaturePart):
        name = "halved"
        module = Halved

    register_method(replace(own_method, temperature_scheme=HalvedPart()))
    loss = create_loss("own")
    for expected in (0.5, 0.25):
        run_step(loss, make_steps(1)[0])
        assert loss.metrics()["temperature_median"] == expected


def test_wrong_defaults_of_a_method_are_rejected(own_method: Method) -> None:
    register_method(replace(own_method, temperature_scheme=Constant(temperature=-1.0)))
    with pytest.raises(OptionError, match=r"temperature=-1.0: expected a number > 0"):
        create_loss("own")


def test_a_loss_is_found_by_its_module(own_method: Method, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    imported = "from openclip_ext.losses.options import *\n"
    (tmp_path / "loss_of_my_own.py").write_text(imported + "METHOD, OTHER = Scaled('mine', Minibatch(), Constant()), 3")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    name = "loss_of_my_own:METHOD"
    assert isinstance(create_loss(name, temperature=0.1), openclip_ext.ContrastiveLoss)
    assert "mine" in list_losses()
    with pytest.raises(OptionError, match="expected a Method object, found 3"):
        create_loss("loss_of_my_own:OTHER")
    with pytest.raises(OptionError, match="loss 'no_such_module:METHOD': No module named 'no_such_module'"):
        create_loss("no_such_module:METHOD")
