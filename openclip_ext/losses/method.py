"""The declaration of a method, one or more in each file of this folder."""

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

    Two parts can have the same name if they estimate different quantities: the objective decides.

    Attributes:
        name: value of the option ``normalizer``.
        build: the class. Its keyword-only arguments are its options.
        objective: the objective of a loss with this normalizer, unless its method declares one.
        defaults: defaults that differ from the options' own defaults; also for temperature schemes without a default.
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
        long_run_defaults: defaults that differ in a training of many optimizer steps.
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
        refused: common options that it does not support, with the reason.
        parts: classes of an objective, a normalizer and a temperature scheme that it is built from.
    """

    build: type[ContrastiveLoss]
    defaults: dict[str, Any] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    parts: tuple[type[Objective], type[Normalizer], type[TemperatureScheme]] | tuple[()] = ()


@dataclass(frozen=True)
class Method:
    """A loss by name: composed of parts, or a :class:`WholeLoss`, or a whole loss unless the user chooses a part.

    Attributes:
        name: value of ``--loss``.
        normalizer, temperature_scheme: names of its parts; the user can override both.
        objective: what it minimizes. None means the objective of its normalizer.
        normalizer_defaults, temperature_defaults: defaults for the options of its own parts, not of their replacements.
        training_defaults: defaults of the training program that differ from the paper's, if the normalizer is its own.
        training_scheme: temperature scheme of the training program; empty means the paper's.
        fixed: arguments of its parts that are not options.
        whole: the loss that is not composed of parts, or None.
        two_views: the loss of this name for two views of each image, without texts, or None.
        head: class of its ``model_head()``, or None; the attribute ``kind`` is its name in checkpoints.
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
