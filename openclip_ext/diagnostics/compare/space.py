"""What is tried: for each loss settings of the temperature, each at several learning rates. Data, no code.

All losses get equally many configurations, the first ones of :func:`configurations`, which begin with what is most likely
to be good and take each setting once before any a second time.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from openclip_ext.losses import registry

BASELINE = "openclip"
DEFAULT_LOSSES = (BASELINE, "fastclip", "neuclip", "queueclip", "amorlip")
LR_FACTORS = (1.0, 0.5, 2.0)
# How far log τ can go in a run at a constant rate: Adam moves a lone parameter by about its rate in each step.
_TRAVEL = 0.8


@dataclass(frozen=True)
class Setting:
    """A way to get the temperature.

    Attributes:
        options: for ``create_loss``.
        travel: sets ``lr_tau`` to ``travel / steps``, so that runs of any length can go equally far; None: the loss's.
    """

    options: Mapping[str, Any] = field(default_factory=dict)
    travel: float | None = None

    def resolved(self, steps: int) -> dict[str, Any]:
        """The options of a run of so many optimizer steps."""
        return dict(self.options) | ({} if self.travel is None else {"lr_tau": float(f"{self.travel / steps:.2g}")})


@dataclass(frozen=True)
class Configuration:
    """One candidate: a loss, its setting, and a factor of the learning rate."""

    loss: str
    setting: Setting
    lr_factor: float


def _constant(*values: float) -> tuple[Setting, ...]:
    return tuple(Setting({"temperature_scheme": "constant", "temperature": value}) for value in values)


def _solved(*values: float) -> tuple[Setting, ...]:
    return tuple(Setting({"temperature_scheme": "solved", "rho": value}) for value in values)


def _learned(*values: float) -> tuple[Setting, ...]:
    return tuple(Setting({"rho": value}, travel=_TRAVEL) for value in values)


_AS_OPENCLIP = (
    Setting(),
    *_solved(5.0),
    *_constant(0.05),
    Setting({"temperature": 0.03}),
    *_constant(0.03),
    *_solved(4.0),
)
_REGULARIZED = (*_solved(5.0), *_learned(5.0), *_constant(0.05), *_learned(6.5), *_solved(4.0), *_constant(0.03))


def settings_of(loss: str, fixed: Mapping[str, Any]) -> list[Setting]:
    """The settings that a loss takes, the most likely first.

    Args:
        loss: its name.
        fixed: options that the user gave for all losses.

    Raises:
        ValueError: an unknown loss.
    """
    takes_rho = "rho" in registry.options_used_by(loss)
    settings = _REGULARIZED if takes_rho else _AS_OPENCLIP
    found = [setting for setting in settings if _is_taken(loss, setting.options, fixed)]
    return found or [Setting()]


def _is_taken(loss: str, options: Mapping[str, Any], fixed: Mapping[str, Any]) -> bool:
    parts = {part: {**fixed, **options}.get(part) for part in ("normalizer", "temperature_scheme")}
    try:
        return options.keys() <= registry.options_used_by(loss, **parts).keys() | {"normalizer", "temperature_scheme"}
    except ValueError:
        return False


def configurations(loss: str, fixed: Mapping[str, Any]) -> list[Configuration]:
    """All candidates of a loss, in the order in which they are tried."""
    settings = settings_of(loss, fixed)
    return [
        Configuration(loss, setting, LR_FACTORS[(number + shift) % len(LR_FACTORS)])
        for shift in range(len(LR_FACTORS))
        for number, setting in enumerate(settings)
    ]


def most_configurations(losses: Sequence[str], fixed: Mapping[str, Any]) -> int:
    """How many configurations every loss has."""
    return min(len(configurations(loss, fixed)) for loss in losses)
