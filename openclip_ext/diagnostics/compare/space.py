"""What is tried: for each loss settings of the temperature, each at several learning rates. Data, no code.

All losses get equally many configurations, the first ones of :func:`configurations`, which begin with what is most likely
to be good.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from openclip_ext.losses import registry
from openclip_ext.training.flags import PARTS

BASELINE = "openclip"
DEFAULT_LOSSES = (BASELINE, "fastclip", "neuclip", "queueclip", "amorlip")
LR_FACTORS = (1.0, 0.5, 2.0)
# What losses that use these options get in runs of a few epochs: a moving average that remembers many of them is far behind
# (docs/results.md#ablations), and an MLP that starts anew in each does not become accurate (losses/amorlip.py warns).
FOR_SHORT_RUNS: Mapping[str, Any] = {
    "gamma": 0.8,
    "gamma_schedule": "constant",
    "reinitialize": False,
    "ema_decay": 0.0,
    "fit_every": 1,
    "target_every": 1,
}
# So many settings at the first rate come before other rates of the most likely ones.
_BEFORE_RATES = 4
# Sizes to try with whether a loss can be built.
ANY_SIZE: Mapping[str, int] = {"embed_dim": 8, "num_samples": 8}
SEARCHED_OPTIONS = ("temperature_scheme", "temperature", "rho", "rho_end", "rho_switch", "lr_tau")


@dataclass(frozen=True)
class Setting:
    """A way to get the temperature, and what a loss needs in short runs. A learned temperature's rate follows from the run's
    length, as in training.

    Attributes:
        options: for ``create_loss``.
    """

    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Configuration:
    """One candidate: a loss, its setting, and a factor of the learning rate."""

    loss: str
    setting: Setting
    lr_factor: float


def _solved(rho: float) -> dict[str, Any]:
    return {"temperature_scheme": "solved", "rho": rho}


def _constant(temperature: float) -> dict[str, Any]:
    return {"temperature_scheme": "constant", "temperature": temperature}


def _learned(rho: float) -> dict[str, Any]:
    return {"rho": rho, "rho_end": None}


# Of losses made of parts, the most likely first (by the tables of docs/results.md); {} is as published.
_SETTINGS: tuple[dict[str, Any], ...] = (
    _solved(4.0),
    _constant(0.05),
    _constant(0.1),
    _learned(5.0),
    _solved(5.0),
    {},
    _constant(0.03),
    _learned(4.0),
)
# Of OpenCLIP's loss, which has no ρ where it learns the temperature. In a few hundred steps of large batches a high constant
# one is better by far (docs/results.md#small-and-large-batches).
_BASELINE_SETTINGS: tuple[dict[str, Any], ...] = (
    {},
    {"temperature_scheme": "global", "temperature": 0.03},
    _constant(0.1),
    _constant(0.05),
    _solved(4.0),
    _solved(5.0),
    _constant(0.03),
)


# Of losses that are known for their temperature, by its scheme, which they keep.
_OWN_SCHEME: Mapping[str, tuple[dict[str, Any], ...]] = {
    "constant": (_constant(0.05), _constant(0.1), _constant(0.03), {}),
    **{
        scheme: ({"temperature_scheme": scheme}, {"temperature_scheme": scheme, **_learned(5.0)}, {})
        for scheme in ("per-sample", "predicted")
    },
}


def own_scheme(loss: str) -> str:
    """The temperature scheme that a loss has by itself; ``global`` also for OpenCLIP's own, which learn one."""
    return registry.find_method(loss).temperature_scheme or "global"


def settings_of(loss: str, fixed: Mapping[str, Any]) -> list[Setting]:
    """The settings that a loss takes, the most likely first; those that the user's options rule out are left out.

    Args:
        loss: its name.
        fixed: options that the user gave for all losses.

    Raises:
        ValueError: an unknown loss, or one that cannot be built with the user's options.
    """
    fitting = _fitting(loss, fixed)
    found = [setting for setting in fitting if not _refusal(loss, setting, fixed)]
    if not found:
        raise ValueError(f"--losses: {loss} with these options: {_refusal(loss, fitting[0], fixed)}")
    return found


def refusals(loss: str, fixed: Mapping[str, Any]) -> list[str]:
    """Why :func:`settings_of` leaves settings out."""
    return [reason for setting in _fitting(loss, fixed) if (reason := _refusal(loss, setting, fixed))]


def _fitting(loss: str, fixed: Mapping[str, Any]) -> list[Setting]:
    """The settings whose options the loss has."""
    registry.options_used_by(loss)  # an unknown loss ends here
    settings = _BASELINE_SETTINGS if loss == BASELINE else _OWN_SCHEME.get(own_scheme(loss), _SETTINGS)
    found = []
    for options in settings:
        used = _used_options(loss, {**fixed, **options})
        if all(name in used for name in options):
            short = {name: value for name, value in FOR_SHORT_RUNS.items() if name in used and name not in fixed}
            found.append(Setting({**short, **options} if options else {}))
    return found or [Setting()]


def _refusal(loss: str, setting: Setting, fixed: Mapping[str, Any]) -> str:
    """Why the loss cannot be built with a setting; empty: it can."""
    try:
        registry.create_loss(loss, **ANY_SIZE, **options_of(loss, setting, fixed))
    except ValueError as error:
        return str(error)
    return ""


def _used_options(loss: str, options: Mapping[str, Any]) -> Mapping[str, Any]:
    """The options that a loss uses with these; none if there is no such loss of parts."""
    try:
        return registry.options_used_by(loss, **{part: options.get(part) for part in PARTS})
    except ValueError:
        return {}


def options_of(loss: str, setting: Setting, fixed: Mapping[str, Any]) -> dict[str, Any]:
    """For ``create_loss``: a setting's options, and those of the user's that the loss uses with it."""
    options = {**fixed, **setting.options}
    used = registry.options_used_by(loss, **{part: options.get(part) for part in PARTS})
    return {name: value for name, value in options.items() if name in used}


def configurations(loss: str, fixed: Mapping[str, Any]) -> list[Configuration]:
    """All candidates of a loss, in the order in which they are tried: first settings, which matter more, then rates."""
    settings = settings_of(loss, fixed)
    first = [(setting, LR_FACTORS[0]) for setting in settings[:_BEFORE_RATES]]
    every = [(setting, factor) for setting in settings for factor in LR_FACTORS]
    return [Configuration(loss, *one) for one in (*first, *(one for one in every if one not in first))]


def most_configurations(losses: Sequence[str], fixed: Mapping[str, Any]) -> int:
    """How many configurations every loss has."""
    return min(len(configurations(loss, fixed)) for loss in losses)
