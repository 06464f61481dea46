"""Classes that describe a method. Each file in this folder declares its methods with them."""

from dataclasses import dataclass, field
from typing import Any

from openclip_ext.cli.options import Option
from openclip_ext.contrastive.loss import ContrastiveLoss
from openclip_ext.contrastive.normalizer import Normalizer
from openclip_ext.contrastive.objectives import Objective
from openclip_ext.contrastive.temperature import TemperatureScheme


@dataclass(frozen=True)
class NormalizerPart:
    """A normalizer that can be a part of losses.

    Two parts can have the same name if they estimate different quantities. The objective of the loss then selects the part.

    Attributes:
        name: Value of the option ``normalizer`` that selects this part.
        build: The class. Its keyword-only arguments are its options.
        objective: The objective of a loss with this normalizer, if the loss's method declares no objective.
        defaults: Defaults of options that differ from the defaults in ``options.py``. They also apply to options of the
            temperature scheme for which the scheme has no default.
    """

    name: str
    build: type[Normalizer]
    objective: type[Objective]
    defaults: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class TemperaturePart:
    """A temperature scheme that can be a part of losses.

    Attributes:
        name, build, defaults: As in :class:`NormalizerPart`.
        long_run_defaults: Defaults that override ``defaults`` in training runs with many optimizer steps.
    """

    name: str
    build: type[TemperatureScheme]
    defaults: dict[str, Any] = field(default_factory=dict)
    long_run_defaults: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class WholeLoss:
    """A loss whose normalizer and temperature scheme the user cannot choose.

    Attributes:
        build, defaults: As in :class:`NormalizerPart`.
        parts: Classes of the loss's objective, normalizer and temperature scheme. Empty if the loss has no parts.
    """

    build: type[ContrastiveLoss]
    defaults: dict[str, Any] = field(default_factory=dict)
    parts: tuple[type[Objective], type[Normalizer], type[TemperatureScheme]] | tuple[()] = ()


@dataclass(frozen=True)
class Method:
    """A named loss. It is composed of parts that the user can replace, or is a :class:`WholeLoss`, or has both forms.

    If a method has both forms, it is composed of parts only if the user chooses a part or a reference model.

    Attributes:
        name: Value of ``--loss``.
        normalizer, temperature_scheme: Names of the default parts. The user can choose other parts.
        objective: The objective. None means the objective of the normalizer.
        normalizer_defaults, temperature_defaults: Defaults of options. They apply only with the default normalizer or scheme.
        pretrained_scheme: Default temperature scheme of runs that start from a pretrained model. Empty means
            ``temperature_scheme``.
        fixed: Arguments of the parts that the user cannot set.
        whole: The form of the loss without replaceable parts, or None.
        two_views: The variant of this loss for two views of each image, without texts, or None.
        head: Class of the loss's ``model_head()``, or None. The class attribute ``kind`` is the head's name in checkpoints.
        parts: Normalizers and temperature schemes that the method's file adds.
        options: Options that the method's file adds to those in ``losses/options.py``.
    """

    name: str
    normalizer: str = ""
    temperature_scheme: str = ""
    objective: type[Objective] | None = None
    normalizer_defaults: dict[str, Any] = field(default_factory=dict)
    temperature_defaults: dict[str, Any] = field(default_factory=dict)
    pretrained_scheme: str = ""
    fixed: dict[str, Any] = field(default_factory=dict)
    whole: WholeLoss | None = None
    two_views: WholeLoss | None = None
    head: Any = None
    parts: tuple[NormalizerPart | TemperaturePart, ...] = ()
    options: tuple[Option, ...] = ()
