"""List the candidates of each loss: temperature settings, each with several learning rates.

A comparison tries the same number of candidates for each loss, in the order of :func:`candidates`.
"""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from openclip_ext.checkpoint.format import checksum
from openclip_ext.losses import registry
from openclip_ext.losses.options import REFERENCE_OPTIONS

BASELINE = "openclip"
DEFAULT_LOSSES = (BASELINE, "fastclip", "neuclip", "queueclip", "amorlip")
LR_FACTORS = (1.0, 0.5, 2.0)
# Options for runs of a few epochs, in which a moving average over many epochs adapts too slowly
# (docs/experiments/papers-claims.md#ablations), and an MLP that is reset in each epoch does not become accurate.
FOR_SHORT_RUNS: Mapping[str, Any] = {
    "gamma": 0.8,
    "gamma_schedule": "constant",
    "reinitialize": False,
    "ema_decay": 0.0,
    "fit_every": 1,
    "target_every": 1,
}
SEARCHED_OPTIONS = ("temperature_scheme", "temperature", "rho", "rho_end", "rho_switch", "lr_tau")
# Number of settings that are tried with the first learning rate before other learning rates are tried.
_BEFORE_RATES = 4

# Options of ``create_loss``, by name.
Options = dict[str, Any]


def _solved(rho: float) -> Options:
    return {"temperature_scheme": "solved", "rho": rho}


def _constant(temperature: float) -> Options:
    return {"temperature_scheme": "constant", "temperature": temperature}


def _learned(rho: float) -> Options:
    return {"temperature_scheme": "global", "rho": rho, "rho_end": None}


# Settings of losses whose temperature scheme can be chosen, the most promising first (see docs/results.md). {} is the
# loss's default.
_SETTINGS: Sequence[Options] = (
    *(_solved(4.0), _constant(0.05), _constant(0.1), _learned(5.0)),
    *(_solved(5.0), {}, _constant(0.03), _learned(4.0)),
)
# Settings of OpenCLIP's loss, which has no option ρ if the temperature is learned. In runs of a few hundred steps with large
# batches, a high constant temperature is better (docs/experiments/batch-sizes.md#small-and-large-batches).
_BASELINE_SETTINGS: Sequence[Options] = (
    *({}, {"temperature_scheme": "global", "temperature": 0.03}, _constant(0.1), _constant(0.05)),
    *(_solved(4.0), _solved(5.0), _constant(0.03)),
)
# The settings for losses that always use their default temperature scheme. The keys are these schemes.
_OWN_SCHEME: Mapping[str, Sequence[Options]] = {
    "constant": (_constant(0.05), _constant(0.1), _constant(0.03), {}),
    **{
        scheme: ({"temperature_scheme": scheme}, {**_learned(5.0), "temperature_scheme": scheme}, {})
        for scheme in ("per-sample", "predicted")
    },
}


def settings(loss: str, fixed: Mapping[str, Any]) -> tuple[list[Options], list[str]]:
    """Return the settings that a loss accepts, the most promising first, and the reasons why it rejects other settings.

    Settings with equal options are returned once. All settings include the user's ``fixed`` options that the loss uses.
    """
    if loss == BASELINE:  # the baseline never uses a reference model
        fixed = {name: value for name, value in fixed.items() if name not in REFERENCE_OPTIONS}
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
        raise ValueError(f"--losses: {loss} cannot be trained with these options: {refusals[0]}")
    return found, refusals


def source(loss: str) -> dict[str, str]:
    """Return a digest of the file of a user's own loss, because its runs must not be reused after a change; else empty."""
    if ":" not in loss:
        return {}
    file = sys.modules[loss.partition(":")[0]].__file__
    return {} if file is None else {"source": checksum(Path(file))}


def own_scheme(loss: str) -> str:
    """Return a loss's default temperature scheme. For OpenCLIP's losses it is ``global``, a learned temperature."""
    return registry.options_used_by(loss).get("temperature_scheme", "global")


def _options_used(loss: str, options: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return all options that a loss uses if ``options`` are given; empty if the combination is invalid."""
    try:
        return registry.options_used_by(loss, **options)
    except ValueError:
        return {}


def candidates(loss: str, fixed: Mapping[str, Any]) -> list[tuple[Options, float]]:
    """Return pairs ``(setting, learning rate factor)`` in the order of trial; settings matter more than rates."""
    found, _ = settings(loss, fixed)
    first = [(setting, LR_FACTORS[0]) for setting in found[:_BEFORE_RATES]]
    every = [(setting, factor) for setting in found for factor in LR_FACTORS]
    return [*first, *(candidate for candidate in every if candidate not in first)]


def setting_words(loss: str, options: Mapping[str, Any]) -> str:
    """Describe a setting in a few words, such as ``τ learned, ρ 5``."""
    scheme = options.get("temperature_scheme", own_scheme(loss))
    words = [f"τ {'learned' if scheme == 'global' else scheme}"]
    words += [f"ρ {options['rho']:g}"] if "rho" in options else []
    if "temperature" in options:
        words.append(f"{options['temperature']:g}" if scheme == "constant" else f"from {options['temperature']:g}")
    words += [f"γ {options['gamma']:g}"] if "gamma" in options else []
    words += ["MLP kept"] if options.get("reinitialize") is False else []
    return ", ".join(words)
