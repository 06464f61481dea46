"""What is tried: for each loss settings of the temperature, each at several learning rates. Data, little code.

All losses get equally many candidates, the first ones of :func:`candidates`, which begin with what is most likely to be good.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from openclip_ext.losses import registry

BASELINE = "openclip"
DEFAULT_LOSSES = (BASELINE, "fastclip", "neuclip", "queueclip", "amorlip")
LR_FACTORS = (1.0, 0.5, 2.0)
# What losses that use these options get in runs of a few epochs: a moving average that remembers many of them is far behind
# (docs/experiments/papers-claims.md#ablations), and an MLP that starts anew in each does not become accurate.
FOR_SHORT_RUNS: Mapping[str, Any] = {
    "gamma": 0.8,
    "gamma_schedule": "constant",
    "reinitialize": False,
    "ema_decay": 0.0,
    "fit_every": 1,
    "target_every": 1,
}
SEARCHED_OPTIONS = ("temperature_scheme", "temperature", "rho", "rho_end", "rho_switch", "lr_tau")
# So many settings at the first rate come before other rates of the most likely ones.
_BEFORE_RATES = 4

# Options for ``create_loss``.
Options = dict[str, Any]


def _solved(rho: float) -> Options:
    return {"temperature_scheme": "solved", "rho": rho}


def _constant(temperature: float) -> Options:
    return {"temperature_scheme": "constant", "temperature": temperature}


def _learned(rho: float) -> Options:
    return {"temperature_scheme": "global", "rho": rho, "rho_end": None}


# Of losses made of parts, the most likely first (by the tables of docs/results.md); {} is as published.
_SETTINGS: Sequence[Options] = (
    *(_solved(4.0), _constant(0.05), _constant(0.1), _learned(5.0)),
    *(_solved(5.0), {}, _constant(0.03), _learned(4.0)),
)
# Of OpenCLIP's loss, which has no ρ where it learns the temperature. In a few hundred steps of large batches a high constant
# one is better by far (docs/experiments/batch-sizes.md#small-and-large-batches).
_BASELINE_SETTINGS: Sequence[Options] = (
    *({}, {"temperature_scheme": "global", "temperature": 0.03}, _constant(0.1), _constant(0.05)),
    *(_solved(4.0), _solved(5.0), _constant(0.03)),
)
# Of losses that are known for their temperature, by its scheme, which they keep.
_OWN_SCHEME: Mapping[str, Sequence[Options]] = {
    "constant": (_constant(0.05), _constant(0.1), _constant(0.03), {}),
    **{
        scheme: ({"temperature_scheme": scheme}, {**_learned(5.0), "temperature_scheme": scheme}, {})
        for scheme in ("per-sample", "predicted")
    },
}


def settings(loss: str, fixed: Mapping[str, Any]) -> tuple[list[Options], list[str]]:
    """Return the settings that a loss takes, the most likely first, and why others cannot be built.

    Of settings that are the same for the loss, as its defaults and what they say in words, it returns the first.

    Args:
        loss: its name.
        fixed: options that the user gave for all losses; a setting has those of them that the loss uses.

    Raises:
        ValueError: an unknown loss, or one that cannot be built with the user's options.
    """
    found, refusals, complete = [], [], []
    for options in _BASELINE_SETTINGS if loss == BASELINE else _OWN_SCHEME.get(own_scheme(loss), _SETTINGS):
        used = _options_used(loss, {**fixed, **options})
        if any(name not in used for name in options):
            continue
        given = {**(FOR_SHORT_RUNS if options else {}), **fixed, **options}
        setting = {name: value for name, value in given.items() if name in used}
        if {**used, **setting} in complete:
            continue
        complete.append({**used, **setting})
        try:
            registry.check_options(loss, **setting)
            found.append(setting)
        except ValueError as error:
            refusals.append(str(error))
    if not found:
        raise ValueError(f"--losses: {loss} with these options: {refusals[0]}")
    return found, refusals


def own_scheme(loss: str) -> str:
    """Return the temperature scheme that a loss has by itself; ``global`` also for OpenCLIP's own, which learn one."""
    return registry.find_method(loss).temperature_scheme or "global"


def _options_used(loss: str, options: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the options that a loss uses with these; none if there is no such loss of parts."""
    try:
        return registry.options_used_by(loss, **options)
    except ValueError:
        return {}


def candidates(loss: str, fixed: Mapping[str, Any]) -> list[tuple[Options, float]]:
    """Return a loss's settings and factors of the learning rate as they are tried: first settings, which matter more."""
    found, _ = settings(loss, fixed)
    first = [(setting, LR_FACTORS[0]) for setting in found[:_BEFORE_RATES]]
    every = [(setting, factor) for setting in found for factor in LR_FACTORS]
    return [*first, *(one for one in every if one not in first)]


def setting_words(loss: str, options: Mapping[str, Any]) -> str:
    """Return a setting in a few words: ``τ learned, ρ 5``."""
    scheme = options.get("temperature_scheme", own_scheme(loss))
    words = [f"τ {'learned' if scheme == 'global' else scheme}"]
    words += [f"ρ {options['rho']:g}"] if "rho" in options else []
    if "temperature" in options:
        words.append(f"{options['temperature']:g}" if scheme == "constant" else f"from {options['temperature']:g}")
    words += [f"γ {options['gamma']:g}"] if "gamma" in options else []
    words += ["MLP kept"] if options.get("reinitialize") is False else []
    return ", ".join(words)
