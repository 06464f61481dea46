"""From names to losses: which parts a method consists of, and which options they take."""

import difflib
import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from openclip_ext.contrastive.global_loss import GlobalContrastiveLoss
from openclip_ext.contrastive.loss import ContrastiveLoss
from openclip_ext.contrastive.normalizer import MinibatchNormalizer
from openclip_ext.contrastive.objectives import SURROGATES
from openclip_ext.contrastive.temperature import ConstantTemperature, GlobalTemperature, UnregularizedTemperature
from openclip_ext.losses.amorlip import MlpNormalizer, PartitionNormalizer
from openclip_ext.losses.cliplite import ClipLiteLoss
from openclip_ext.losses.fastclip import MovingAverageNormalizer
from openclip_ext.losses.isogclr import PerSampleTemperature
from openclip_ext.losses.neuclip import PrototypeNormalizer
from openclip_ext.losses.openclip import OpenClipLoss, SiglipLoss
from openclip_ext.losses.options import OPTIONS
from openclip_ext.losses.queueclip import QueueNormalizer
from openclip_ext.losses.simclr import DynamicContrastiveLoss, SimClrLoss
from openclip_ext.losses.tempnet import PredictedTemperature


@dataclass(frozen=True)
class _Part:
    """A class a loss is made of, with what its options are where they are not the table's defaults.

    Attributes:
        build: the class. Its keyword-only arguments say which options it takes.
        defaults: options' defaults.
        surrogate: for normalizers, the surrogate they go with.
    """

    build: Callable[..., Any]
    defaults: dict[str, Any] = field(default_factory=dict)
    surrogate: str = "contrastive"


_NORMALIZERS = {
    "minibatch": _Part(MinibatchNormalizer),
    "moving-average": _Part(MovingAverageNormalizer),
    "mlp": _Part(MlpNormalizer, {"normalizer_lr": 1e-3}, surrogate="unified"),
    "prototypes": _Part(PrototypeNormalizer, surrogate="unified"),
    # Without its gradient the queue is no control variate for the batch.
    "queue": _Part(QueueNormalizer, {"alpha_gradient": True}, surrogate="unified"),
}
_PARTITION_MLP = _Part(
    PartitionNormalizer,
    {
        "normalizer_objective": "l2-log",
        "normalizer_updates": 3,
        "normalizer_lr": 1e-3,
        "fit_every": 8,
        "target_every": 2,
        "ema_decay": 0.999,
        "previous_weight": 0.8,
        "reinitialize": True,
    },
    surrogate="partition",
)
_TEMPERATURES = {
    "constant": _Part(ConstantTemperature),
    "global": _Part(GlobalTemperature),
    "per-sample": _Part(PerSampleTemperature, {"temperature": 0.03, "lr_tau": 0.0133, "rho": 7.0}),
    "predicted": _Part(PredictedTemperature, {"lr_tau": 3e-5, "rho": 9.5}),
}
_GLOBAL_WITHOUT_REGULARIZER = _Part(UnregularizedTemperature)


@dataclass(frozen=True)
class Preset:
    """A method of a paper as a combination of parts.

    Attributes:
        normalizer, temperature_scheme: names of the parts; both can be overridden.
        normalizer_defaults, temperature_defaults: options in which the method differs from its parts' defaults; they go
            with the method's own parts only.
        surrogate: where it is not the normalizer's.
        slow_when_small: FastCLIP-v3's third of the temperature's learning rate at ``τ ≤ 0.03``.
    """

    normalizer: str
    temperature_scheme: str
    normalizer_defaults: dict[str, Any] = field(default_factory=dict)
    temperature_defaults: dict[str, Any] = field(default_factory=dict)
    surrogate: str | None = None
    slow_when_small: bool = False


_CONSTANT_GAMMA = {"gamma": 0.8, "gamma_schedule": "constant"}
_FASTCLIP_V3 = Preset("moving-average", "global", temperature_defaults={"lr_tau": 2e-4}, slow_when_small=True)
_PRESETS = {
    "sogclr": Preset("moving-average", "constant", normalizer_defaults=_CONSTANT_GAMMA),
    "isogclr": Preset("moving-average", "per-sample", normalizer_defaults=_CONSTANT_GAMMA),
    "fastclip": _FASTCLIP_V3,
    "fastclip-v0": Preset("moving-average", "global", surrogate="unscaled"),
    "fastclip-v1": Preset("moving-average", "constant"),
    "fastclip-v2": Preset("moving-average", "per-sample"),
    "fastclip-v3": _FASTCLIP_V3,
    "tempnet": Preset("moving-average", "predicted"),
    "amorlip": Preset(
        "mlp",
        "global",
        temperature_defaults={"lr_tau": 2e-4, "rho_end": -8.0},
        surrogate="partition",
        slow_when_small=True,
    ),
    "neuclip": Preset(
        "prototypes",
        "global",
        normalizer_defaults={"alpha_gradient": True},
        temperature_defaults={"lr_tau": 1.25e-4},
    ),
    "queueclip": Preset("queue", "global", temperature_defaults={"lr_tau": 1.25e-4}),
}
_SIMCLR = {"temperature": 0.1, "projection_dim": 128}
_STANDALONE = {
    "openclip": _Part(OpenClipLoss),
    "siglip": _Part(SiglipLoss),
    "cliplite": _Part(ClipLiteLoss, {"temperature": 0.07}),
    "simclr": _Part(SimClrLoss, _SIMCLR | {"views": 2}),
}
# Losses of two views of each image; the names have another meaning (or none) with one.
_TWO_VIEWS = {
    "simclr": _STANDALONE["simclr"],
    "sogclr": _Part(DynamicContrastiveLoss, _SIMCLR | _CONSTANT_GAMMA | {"views": 2}),
}


def list_losses() -> list[str]:
    """The names :func:`create_loss` and ``--loss`` take."""
    return [*_STANDALONE, *_PRESETS]


def create_loss(
    name: str, embed_dim: int | None = None, num_samples: int | None = None, **options: Any
) -> ContrastiveLoss:
    """Create a loss.

    Args:
        name: one of :func:`list_losses`.
        embed_dim: width of the embeddings; needed by losses with a network or prototypes, ignored by others.
        num_samples: size of the index space; needed by losses that keep state for each sample, ignored by others.
        options: see :data:`openclip_ext.losses.options.OPTIONS`; all have a default.

    Returns:
        A module whose call is ``loss(image_features, text_features, logit_scale, index=index, output_dict=True)``.

    Raises:
        ValueError: an unknown loss, an option no part of this loss uses, a value out of range, a combination that makes no
            sense, or a missing ``embed_dim`` or ``num_samples``.

    Example:
        >>> loss = create_loss("neuclip", embed_dim=512, prototypes=1024)
        >>> terms = loss(image_features, text_features, logit_scale, output_dict=True)
        >>> sum(terms.values()).backward()
    """
    composition = _compose(name, options.get("normalizer"), options.get("temperature_scheme"), options.get("views"))
    defaults = composition.defaults()
    unused = sorted(set(options) - set(defaults))
    if unused:
        raise ValueError(
            f"{_listed(unused)}: not used by the loss {composition.title!r}, which takes {', '.join(sorted(defaults))}"
        )
    values = defaults | {option: OPTIONS[option].check(value) for option, value in options.items()}
    needed = {"embed_dim": embed_dim, "num_samples": num_samples}
    return composition.build(values | _required(composition, needed))


def options_used_by(
    name: str, normalizer: str | None = None, temperature_scheme: str | None = None, views: int | None = None
) -> dict[str, Any]:
    """The options a loss takes, with the defaults they have there.

    Args:
        name: one of :func:`list_losses`.
        normalizer, temperature_scheme: parts other than the loss's own.
        views: 2 for the loss of that name on two views of each image.

    Raises:
        ValueError: as :func:`create_loss`.
    """
    return _compose(name, normalizer, temperature_scheme, views).defaults()


def requirements_of(
    name: str, normalizer: str | None = None, temperature_scheme: str | None = None, views: int | None = None
) -> set[str]:
    """Which of ``embed_dim`` and ``num_samples`` a loss cannot do without."""
    return _compose(name, normalizer, temperature_scheme, views).keywords() & _REQUIREMENTS.keys()


_REQUIREMENTS = {
    "embed_dim": "the width of the model's embeddings",
    "num_samples": "the number of training samples, the size of the index space (the manifest's)",
}


@dataclass(frozen=True)
class _Composition:
    """Resolved parts of a loss: one that is whole, or a surrogate, a normalizer and a temperature scheme."""

    title: str
    parts: tuple[_Part, ...]
    names: dict[str, str] = field(default_factory=dict)
    overrides: dict[str, Any] = field(default_factory=dict)
    fixed: dict[str, Any] = field(default_factory=dict)

    def keywords(self) -> set[str]:
        """Keyword-only arguments of all parts."""
        return set().union(*(_keywords(part.build) for part in self.parts))

    def defaults(self) -> dict[str, Any]:
        """The options the parts take, with their defaults here, and the names of the parts."""
        keywords = self.keywords()
        values = {option: OPTIONS[option].default for option in OPTIONS if option in keywords}
        for override in (*(part.defaults for part in self.parts), self.overrides):
            values |= override
        return self.names | values

    def build(self, values: dict[str, Any]) -> ContrastiveLoss:
        """Build the loss from values for all keywords."""
        keywords = self.keywords()
        values = values | self.fixed
        parts = [part.build(**{keyword: values[keyword] for keyword in _keywords(part.build)}) for part in self.parts]
        if len(parts) == 1:
            return parts[0]
        sizes = {name: values[name] if name in keywords else None for name in _REQUIREMENTS}
        return GlobalContrastiveLoss(*parts, **sizes)


def _compose(name: str, normalizer: str | None, temperature_scheme: str | None, views: int | None) -> _Composition:
    if name not in list_losses():
        close = difflib.get_close_matches(str(name), list_losses(), n=1)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        raise ValueError(f"unknown loss {name!r}: expected one of {', '.join(list_losses())}.{hint}")
    two_views = views is not None and OPTIONS["views"].check(views) == 2
    if two_views and name not in _TWO_VIEWS:
        raise ValueError(
            f"{name} with views={views}: it compares images with texts; those of two views of an image are "
            f"{', '.join(_TWO_VIEWS)}"
        )
    whole = _TWO_VIEWS[name] if two_views else _STANDALONE.get(name)
    if whole is not None:
        title = f"{name} with views={views}" if two_views else name
        if normalizer or temperature_scheme:
            given = "normalizer" if normalizer else "temperature_scheme"
            raise ValueError(f"{given}: not used by the loss {title!r}, which is not made of such parts")
        return _Composition(title, (whole,))
    return _compose_parts(name, normalizer, temperature_scheme)


def _compose_parts(name: str, normalizer: str | None, temperature_scheme: str | None) -> _Composition:
    preset = _PRESETS[name]
    normalizer = OPTIONS["normalizer"].check(normalizer) or preset.normalizer
    scheme = OPTIONS["temperature_scheme"].check(temperature_scheme) or preset.temperature_scheme
    _refuse_senseless(name, preset, normalizer, scheme)
    normalizer_part = _PARTITION_MLP if preset.surrogate == "partition" else _NORMALIZERS[normalizer]
    surrogate = preset.surrogate or normalizer_part.surrogate
    temperature_part = _GLOBAL_WITHOUT_REGULARIZER if surrogate == "unscaled" else _TEMPERATURES[scheme]
    names = {"normalizer": normalizer, "temperature_scheme": scheme}
    own = {"normalizer": preset.normalizer, "temperature_scheme": preset.temperature_scheme}
    overrides: dict[str, Any] = {}
    if normalizer == preset.normalizer:
        overrides |= preset.normalizer_defaults
    if scheme == preset.temperature_scheme:
        overrides |= preset.temperature_defaults
    return _Composition(
        title=name if names == own else f"{name} with normalizer {normalizer}, temperature scheme {scheme}",
        parts=(_Part(SURROGATES[surrogate]), normalizer_part, temperature_part),
        names=names | ({"views": 1} if name in _TWO_VIEWS else {}),
        overrides=overrides,
        fixed={"slow_when_small": preset.slow_when_small},
    )


def _refuse_senseless(name: str, preset: Preset, normalizer: str, scheme: str) -> None:
    """Raise ValueError for combinations that have no meaning, with the reason."""
    if preset.surrogate == "partition":
        if normalizer != "mlp":
            raise ValueError(
                f"{name} with normalizer={normalizer}: its objective is that of a network for the partition function; for "
                f"another estimator take --loss neuclip --normalizer {normalizer}"
            )
        if scheme in ("per-sample", "predicted"):
            raise ValueError(
                f"{name} with temperature_scheme={scheme}: its second stage stays in each process, and these temperatures are "
                f"learned from the global batch; take --loss neuclip --normalizer mlp --temperature-scheme {scheme}"
            )
    if preset.surrogate == "unscaled" and (normalizer not in ("moving-average", "minibatch") or scheme != "global"):
        raise ValueError(
            f"{name} with normalizer={normalizer}, temperature_scheme={scheme}: fastclip-v0 is defined for batch estimates "
            "and one global temperature; take fastclip-v3, which multiplies the loss by the temperature"
        )


def _keywords(build: Callable[..., Any]) -> set[str]:
    """Names of a class's keyword-only arguments, those it hands to its base class included."""
    names: set[str] = set()
    for cls in inspect.getmro(build):
        parameters = inspect.signature(cls.__init__).parameters.values()
        names |= {parameter.name for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY}
        if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
            break
    return names


def _required(composition: _Composition, given: dict[str, int | None]) -> dict[str, int | None]:
    keywords = composition.keywords()
    for name, meaning in _REQUIREMENTS.items():
        if name not in keywords:
            continue
        value = given[name]
        if value is None:
            raise ValueError(f"the loss {composition.title!r} needs {name}=, {meaning}")
        if isinstance(value, bool) or int(value) != value or value < 1:
            raise ValueError(f"{name}={value!r}: expected a positive integer, {meaning}")
    return given


def _listed(names: list[str]) -> str:
    return ", ".join(f"{name}=" for name in names)
