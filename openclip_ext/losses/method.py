"""Base classes of losses and their parts: frozen dataclasses, whose fields are the options. ``build`` returns the module.

This file and ``options.py`` do not import torch, so that ``--help`` is fast. Modules are imported when they are built.
"""

import importlib
import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar, TypeVar

from openclip_ext.cli.options import Option, OptionError, nearest

Fields = TypeVar("Fields", bound="HasOptions")
AnyMethod = TypeVar("AnyMethod", bound="Method")


def option(default: Any, help: str, **limits: Any) -> Any:
    """Declare a field that is an option. ``limits`` are further attributes of :class:`Option`, such as ``minimum``."""
    return field(default=default, kw_only=True, metadata={"help": help, **limits})


def options_of(cls: type) -> dict[str, Option]:
    """Return the options that a class declares, without those of nested parts. A field with ``| None`` accepts None."""
    hints = typing.get_type_hints(cls)
    found = {}
    for item in fields(cls):
        if item.metadata:
            kinds = typing.get_args(hints[item.name]) or (hints[item.name],)
            nullable = types.NoneType in kinds
            found[item.name] = Option(item.name, kinds[0], item.default, **item.metadata, nullable=nullable)
    return found


@dataclass(frozen=True)
class Sizes:
    """The sizes for which a loss is built.

    Attributes:
        embed_dim: Embedding dimension of the features. None if no part needs it.
        num_samples: Number of training samples. None if no part needs it.
        reference_dim: Embedding dimension of the reference model. 0 (default) means no reference model.
        eps: The constant ε of the objective.
    """

    embed_dim: int | None = None
    num_samples: int | None = None
    reference_dim: int = 0
    eps: float = 0.0


@dataclass(frozen=True)
class HasOptions:
    """A dataclass whose fields are options, or parts with options. The names of all options are unique.

    Attributes:
        module: The class to build, ``"package.module:Class"``, or the class itself.
        needs: The :class:`Sizes` that the class receives, in addition to the options.
    """

    module: ClassVar[Any]
    needs: ClassVar[tuple[str, ...]] = ()

    def build(self, sizes: Sizes) -> Any:
        """Return the module, which receives the options of this object and the sizes that it needs as keywords."""
        given = {name: getattr(sizes, name) for name in self.needs}
        return imported(self.module)(**given, **self.own_values())

    def own_values(self) -> dict[str, Any]:
        """Return the values of this class's options, without those of nested parts."""
        return {name: getattr(self, name) for name in options_of(type(self))}

    def nested(self) -> dict[str, "Part"]:
        """Return the parts of this object by field."""
        values = ((item.name, getattr(self, item.name)) for item in fields(self))
        return {name: value for name, value in values if isinstance(value, Part)}

    def flattened(self) -> Iterator["HasOptions"]:
        """Yield this object and its parts."""
        yield from (self, *self.nested().values())

    def values(self) -> dict[str, Any]:
        """Return the values of all options, also those of nested parts."""
        return {name: value for part in self.flattened() for name, value in part.own_values().items()}

    def with_options(self: Fields, values: Mapping[str, Any]) -> Fields:
        """Return a copy with new values of some options, of this object and of nested parts."""
        own = {name: values[name] for name in options_of(type(self)) if name in values}
        return replace(self, **own, **{name: part.with_options(values) for name, part in self.nested().items()})


def imported(path: Any) -> Any:
    """Return the object at ``"package.module:name"``. Other objects are returned unchanged."""
    if not isinstance(path, str):
        return path
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)


@dataclass(frozen=True)
class Part(HasOptions):
    """A part of a loss. Users choose it by its ``name`` with the option ``kind``."""

    name: ClassVar[str]
    kind: ClassVar[str]


@dataclass(frozen=True)
class NormalizerPart(Part):
    """A normalizer that can be a part of losses.

    Attributes:
        objective: The objective of losses that declare none, as in ``module``.
        lr_tau: Default of the option ``lr_tau`` with this normalizer, if the temperature scheme declares none.
    """

    kind = "normalizer"
    objective: ClassVar[Any] = "openclip_ext.contrastive.objectives:FastCLIPObjective"
    lr_tau: ClassVar[float | None] = None


@dataclass(frozen=True)
class TemperaturePart(Part):
    """A temperature scheme that can be a part of losses."""

    kind = "temperature_scheme"

    def in_run(self, steps: int) -> "TemperaturePart":
        """Return this scheme with its defaults in a run of so many optimizer steps. 0 means that the number is unknown."""
        return self


@dataclass(frozen=True)
class ReferencePart(Part):
    """The options of a reference model (``contrastive/steering.py``)."""

    name = kind = "reference"
    steer: bool = option(
        True, "with a reference model: give a larger weight to negatives on which the model is worse than the reference"
    )
    distill: float = option(
        0.0,
        "with a reference model: weight of the cross entropy between the two models' softmax distributions over the batch",
        minimum=0.0,
    )
    mask_margin: float | None = option(
        None,
        "with a reference model: two samples are no negatives of each other if the reference's similarity of one's image and "
        "the other's text is above those of their own pairs minus this margin, such as 0.2; none: all samples are negatives",
        minimum=0.0,
    )
    reference_temperature: float = option(
        0.01,
        "temperature of the reference model's softmax, for --distill; the training program's default is the reference "
        "model's own temperature",
        exclusive_minimum=0.0,
    )


@dataclass(frozen=True)
class EqualCaptions(HasOptions):
    """The option for equal captions (``contrastive/equal_captions.py``)."""

    equal_captions: str = option(
        "negative",
        "role of other samples with the anchor's caption or image: negatives (as in OpenCLIP), excluded (mask), or positives",
        choices=("negative", "mask", "positive"),
    )


@dataclass(frozen=True)
class Eps(HasOptions):
    """The option ``eps``: the constant ε inside the logarithm of the objective."""

    eps: float = option(
        1e-14,
        "small constant inside the logarithm of the objective (FastCLIP: 1e-14; 1e-6 on LAION-400M)",
        symbol="ε",
        minimum=0.0,
        flag="--loss-eps",
    )


@dataclass(frozen=True)
class Method(HasOptions):
    """A loss by name. A subclass declares ``module`` or implements ``build``.

    Attributes:
        name: Value of ``--loss``.
        summary: One line for lists of losses.
        head: Class of the loss's ``model_head()``, as in ``module``, or None. The class attribute ``kind`` is the head's name
            in checkpoints.
        composed: The form of the loss with parts that the user can choose. None means that there is no other form.
        two_views: The variant of this loss for two views of each image, without texts, or None.
    """

    name: str
    summary: str = field(default="", kw_only=True)
    head: ClassVar[Any] = None
    composed: ClassVar["Composed | None"] = None
    two_views: "TwoViews | None" = field(default=None, kw_only=True)

    def with_options(self: AnyMethod, values: Mapping[str, Any]) -> AnyMethod:
        """Return a copy with new values of some options. Raise OptionError for an option that the loss does not use."""
        known = self.values()
        for name in values:
            if name not in known:
                hint = nearest(name, known)
                raise OptionError(name, f"with_options: the loss {self.name!r} has no option {name!r}{hint}")
        return super().with_options(values)


@dataclass(frozen=True)
class OfParts(Method):
    """A loss of an objective, a normalizer and a temperature scheme.

    Attributes:
        normalizer, temperature_scheme: The parts.
        objective: The objective, as in ``module``. None (default) means the normalizer's objective.
    """

    normalizer: NormalizerPart
    temperature_scheme: TemperaturePart
    objective: Any = field(default=None, kw_only=True)

    def objective_class(self) -> Any:
        return imported(self.objective or self.normalizer.objective)

    def build_parts(self, sizes: Sizes) -> tuple[Any, Any, Any]:
        """Return the objective, the normalizer and the temperature scheme."""
        constant = {"eps": getattr(self, "eps")} if isinstance(self, Eps) else {}  # noqa: B009
        objective = self.objective_class()(**constant)
        sizes = replace(sizes, eps=objective.eps)
        return objective, self.normalizer.build(sizes), self.temperature_scheme.build(sizes)


@dataclass(frozen=True)
class Composed(EqualCaptions, OfParts):
    """A loss whose normalizer and temperature scheme the user can choose.

    Attributes:
        pretrained_scheme: Default scheme of runs that start from a pretrained model. Empty means ``temperature_scheme``.
        other_parts: Parts that replace those of the package with the same names, if the user chooses them.
        reference: The options of a reference model; None without such a model.
    """

    pretrained_scheme: str = field(default="", kw_only=True)
    other_parts: tuple[Part, ...] = field(default=(), kw_only=True)
    reference: ReferencePart | None = field(default=None, kw_only=True)

    def values(self) -> dict[str, Any]:
        chosen = {part.kind: part.name for part in (self.normalizer, self.temperature_scheme)}
        return chosen | super().values() | ({"views": 1} if self.two_views is not None else {})

    def build(self, sizes: Sizes) -> Any:
        from openclip_ext.contrastive.global_loss import GlobalContrastiveLoss

        reference = self.reference or ReferencePart()
        # With steering, the features that the parts receive also contain the reference model's embeddings.
        steered = sizes.reference_dim if reference.steer else 0
        width = None if sizes.embed_dim is None else sizes.embed_dim + steered
        of_parts = replace(sizes, embed_dim=width, reference_dim=steered)
        return GlobalContrastiveLoss(
            *self.build_parts(of_parts),
            sizes.embed_dim,
            sizes.num_samples,
            reference_dim=sizes.reference_dim,
            equal_captions=self.equal_captions,
            **reference.own_values(),
        )


@dataclass(frozen=True)
class Scaled(Eps, Composed):
    """A loss of parts whose objective contains ε, such as ``τ·[exp(−α)(ε+g) + α] + τ(ρ−1)`` [NeuCLIP 12]."""


@dataclass(frozen=True)
class TwoViews(OfParts):
    """A loss of two views of each image, without texts. The user cannot choose its parts."""

    head = "openclip_ext.losses.simclr:Projector"
    needs = ("embed_dim",)
    projection_dim: int | None = option(
        None, "dimension of the loss's projection of the embeddings; none: the embedding dimension", minimum=1
    )
    seed: int = option(0, "seed of the loss's own networks", openclip_flag=True)

    def values(self) -> dict[str, Any]:
        return super().values() | {"views": 2}

    def build(self, sizes: Sizes) -> Any:
        from openclip_ext.losses.simclr import TwoViewLoss

        own: dict[str, Any] = {"embed_dim": sizes.embed_dim, "projection_dim": self.projection_dim, "seed": self.seed}
        return TwoViewLoss(*self.build_parts(sizes), sizes.num_samples, **own)


@dataclass(frozen=True)
class ScaledTwoViews(Eps, TwoViews):
    """A loss of two views whose objective contains ε."""
