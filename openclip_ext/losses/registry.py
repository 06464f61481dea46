"""From names to losses: which parts a method consists of, and which options they take."""

import difflib
import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from openclip_ext.losses.base import ContrastiveLoss
from openclip_ext.losses.global_contrastive import GlobalContrastiveLoss
from openclip_ext.losses.openclip import OpenClipLoss, SiglipLoss
from openclip_ext.losses.options import OPTIONS
from openclip_ext.losses.surrogates import SURROGATES
from openclip_ext.normalizers.minibatch import MinibatchNormalizer
from openclip_ext.normalizers.mlp import MlpNormalizer, PartitionNormalizer
from openclip_ext.normalizers.moving_average import MovingAverageNormalizer
from openclip_ext.normalizers.prototypes import PrototypeNormalizer
from openclip_ext.normalizers.queue import QueueNormalizer
from openclip_ext.temperatures.constant import ConstantTemperature
from openclip_ext.temperatures.global_learned import GlobalTemperature, UnregularizedTemperature


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
    "queue": _Part(QueueNormalizer, surrogate="unified"),
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
}
_GLOBAL_WITHOUT_REGULARIZER = _Part(UnregularizedTemperature)


@dataclass(frozen=True)
class Preset:
    """A method of a paper as a combination of parts.

    Attributes:
        normalizer, temperature_scheme: names of the parts; both can be overridden.
        defaults: options in which the method differs from its parts' defaults.
        surrogate: where it is not the normalizer's.
        slow_when_small: FastCLIP-v3's third of the temperature's learning rate at ``τ ≤ 0.03``.
    """

    normalizer: str
    temperature_scheme: str
    defaults: dict[str, Any] = field(default_factory=dict)
    surrogate: str | None = None
    slow_when_small: bool = False


_FASTCLIP_V3 = Preset("moving-average", "global", {"lr_tau": 2e-4}, slow_when_small=True)
_PRESETS = {
    "sogclr": Preset("moving-average", "constant", {"gamma": 0.8, "gamma_schedule": "constant"}),
    "fastclip": _FASTCLIP_V3,
    "fastclip-v0": Preset("moving-average", "global", surrogate="unscaled"),
    "fastclip-v1": Preset("moving-average", "constant"),
    "fastclip-v3": _FASTCLIP_V3,
    "amorlip": Preset("mlp", "global", {"lr_tau": 2e-4, "rho_end": -8.0}, surrogate="partition", slow_when_small=True),
    "neuclip": Preset("prototypes", "global", {"lr_tau": 1.25e-4, "alpha_gradient": True}),
    "queueclip": Preset("queue", "global", {"lr_tau": 1.25e-4, "alpha_gradient": True}),
}
_STANDALONE: dict[str, type[ContrastiveLoss]] = {"openclip": OpenClipLoss, "siglip": SiglipLoss}


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
    composition = _compose(name, options.get("normalizer"), options.get("temperature_scheme"))
    defaults = composition.defaults()
    unused = sorted(set(options) - set(defaults))
    if unused:
        raise ValueError(
            f"{_listed(unused)}: not used by the loss {composition.title!r}, which takes {', '.join(sorted(defaults))}"
        )
    values = defaults | {option: OPTIONS[option].check(value) for option, value in options.items()}
    needed = {"embed_dim": embed_dim, "num_samples": num_samples}
    return composition.build(values | _required(composition, needed))


def options_used_by(name: str, normalizer: str | None = None, temperature_scheme: str | None = None) -> dict[str, Any]:
    """The options a loss takes, with the defaults they have there.

    Args:
        name: one of :func:`list_losses`.
        normalizer, temperature_scheme: parts other than the loss's own.

    Raises:
        ValueError: as :func:`create_loss`.
    """
    return _compose(name, normalizer, temperature_scheme).defaults()


def requirements_of(name: str, normalizer: str | None = None, temperature_scheme: str | None = None) -> set[str]:
    """Which of ``embed_dim`` and ``num_samples`` a loss cannot do without."""
    return _compose(name, normalizer, temperature_scheme).keywords() & _REQUIREMENTS.keys()


_REQUIREMENTS = {
    "embed_dim": "the width of the model's embeddings",
    "num_samples": "the number of training samples, the size of the index space (the manifest's)",
}


@dataclass(frozen=True)
class _Composition:
    """Resolved parts of a loss."""

    title: str
    parts: tuple[_Part, ...]
    preset: Preset | None = None

    def keywords(self) -> set[str]:
        """Keyword-only arguments of all parts."""
        return set().union(*(_keywords(part.build) for part in self.parts))

    def defaults(self) -> dict[str, Any]:
        """The options the parts take, with their defaults here."""
        used = [option for option in OPTIONS if option in self.keywords()]
        values = {option: OPTIONS[option].default for option in used}
        overrides = [part.defaults for part in self.parts] + ([self.preset.defaults] if self.preset else [])
        for override in overrides:
            values.update({option: value for option, value in override.items() if option in values})
        if self.preset:
            names = {"normalizer": self.preset.normalizer, "temperature_scheme": self.preset.temperature_scheme}
            values = names | values
        return values

    def build(self, values: dict[str, Any]) -> ContrastiveLoss:
        """Build the loss from values for all keywords."""
        if self.preset is None:
            return self._part(self.parts[0], values)
        values = values | {"slow_when_small": self.preset.slow_when_small}
        surrogate, normalizer, temperature = (self._part(part, values) for part in self.parts)
        needed = self.keywords()
        return GlobalContrastiveLoss(
            surrogate,
            normalizer,
            temperature,
            embed_dim=values["embed_dim"] if "embed_dim" in needed else None,
            num_samples=values["num_samples"] if "num_samples" in needed else None,
        )

    @staticmethod
    def _part(part: _Part, values: dict[str, Any]) -> Any:
        return part.build(**{keyword: values[keyword] for keyword in _keywords(part.build)})


def _compose(name: str, normalizer: str | None, temperature_scheme: str | None) -> _Composition:
    if name in _STANDALONE:
        if normalizer or temperature_scheme:
            given = "normalizer" if normalizer else "temperature_scheme"
            raise ValueError(f"{given}: not used by the loss {name!r}, which is OpenCLIP's own")
        return _Composition(name, (_Part(_STANDALONE[name]),))
    if name not in _PRESETS:
        close = difflib.get_close_matches(str(name), list_losses(), n=1)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        raise ValueError(f"unknown loss {name!r}: expected one of {', '.join(list_losses())}.{hint}")
    preset = _PRESETS[name]
    normalizer = OPTIONS["normalizer"].check(normalizer) or preset.normalizer
    scheme = OPTIONS["temperature_scheme"].check(temperature_scheme) or preset.temperature_scheme
    _refuse_senseless(name, preset, normalizer, scheme)
    normalizer_part = _PARTITION_MLP if preset.surrogate == "partition" else _NORMALIZERS[normalizer]
    surrogate = preset.surrogate or normalizer_part.surrogate
    temperature_part = _GLOBAL_WITHOUT_REGULARIZER if surrogate == "unscaled" else _TEMPERATURES[scheme]
    title = name
    if (normalizer, scheme) != (preset.normalizer, preset.temperature_scheme):
        title = f"{name} with normalizer {normalizer} and temperature scheme {scheme}"
    return _Composition(title, (_Part(SURROGATES[surrogate]), normalizer_part, temperature_part), preset)


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
