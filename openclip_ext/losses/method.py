"""How a file in this folder declares the method that it implements."""

from dataclasses import dataclass, field
from typing import Any

from openclip_ext.cli.options import Option
from openclip_ext.contrastive.loss import ContrastiveLoss
from openclip_ext.contrastive.normalizer import Normalizer
from openclip_ext.contrastive.objectives import Objective
from openclip_ext.contrastive.temperature import TemperatureScheme


@dataclass(frozen=True)
class NormalizerPart:
    """A normalizer that losses can be composed of.

    Two parts may have the same name if they estimate different quantities: the objective decides.

    Attributes:
        name: value of the option ``normalizer``.
        build: the class. Its keyword-only arguments are its options.
        objective: what a loss minimizes with it, unless its method names an objective.
        defaults: defaults of options that differ from the options' own; also for temperature schemes without a default.
    """

    name: str
    build: type[Normalizer]
    objective: type[Objective]
    defaults: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class TemperaturePart:
    """A temperature scheme that losses can be composed of.

    Attributes:
        name, build, defaults: as in :class:`NormalizerPart`.
        long_run_defaults: what differs from the defaults in a training of many optimizer steps.
    """

    name: str
    build: type[TemperatureScheme]
    defaults: dict[str, Any] = field(default_factory=dict)
    long_run_defaults: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class WholeLoss:
    """A loss that is not composed of a normalizer and a temperature scheme.

    Attributes:
        build, defaults: as in :class:`NormalizerPart`.
        refused: common options that it does not take, with the reason.
        parts: classes of an objective, a normalizer and a temperature scheme that it is built from.
    """

    build: type[ContrastiveLoss]
    defaults: dict[str, Any] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    parts: tuple[type[Objective], type[Normalizer], type[TemperatureScheme]] | tuple[()] = ()


@dataclass(frozen=True)
class Method:
    """A loss by name: composed of parts, or a :class:`WholeLoss`, or a whole loss unless the user asks for a part.

    Attributes:
        name: value of ``--loss``.
        normalizer, temperature_scheme: names of its parts; the user can override both.
        objective: what it minimizes; None: the objective of its normalizer.
        normalizer_defaults, temperature_defaults: its own defaults for the options of these parts, not of their replacements.
        training_defaults: what the training program takes where the defaults are the paper's, if the normalizer is its own.
        training_scheme: the temperature scheme that the training program takes instead of the paper's; empty: the paper's.
        fixed: arguments of its parts that are no options.
        whole: the loss that is not composed of parts; None: there is none.
        two_views: the loss of this name for two views of each image, without texts; None: there is none.
        head: class of its ``model_head()``, with the attribute ``kind``, which names it in checkpoints; None: it has none.
        parts: normalizers and temperature schemes that its file adds.
        options: options that its file adds to those of ``losses/options.py``.
    """

    name: str
    normalizer: str = ""
    temperature_scheme: str = ""
    objective: type[Objective] | None = None
    normalizer_defaults: dict[str, Any] = field(default_factory=dict)
    temperature_defaults: dict[str, Any] = field(default_factory=dict)
    training_defaults: dict[str, Any] = field(default_factory=dict)
    training_scheme: str = ""
    fixed: dict[str, Any] = field(default_factory=dict)
    whole: WholeLoss | None = None
    two_views: WholeLoss | None = None
    head: Any = None
    parts: tuple[NormalizerPart | TemperaturePart, ...] = ()
    options: tuple[Option, ...] = ()
