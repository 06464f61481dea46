"""From names to losses. Collects the METHODs of the files in this folder, and composes their parts."""

import difflib
import importlib
import inspect
import pkgutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from openclip_ext import losses
from openclip_ext.contrastive.equal_captions import NEGATIVE
from openclip_ext.contrastive.global_loss import GlobalContrastiveLoss
from openclip_ext.contrastive.loss import ContrastiveLoss
from openclip_ext.contrastive.normalizer import MinibatchNormalizer
from openclip_ext.contrastive.objectives import Contrastive, Objective, incompatibility
from openclip_ext.contrastive.solved_temperature import SolvedTemperature
from openclip_ext.contrastive.temperature import ConstantTemperature, GlobalTemperature, UnregularizedTemperature
from openclip_ext.losses.method import Method, NormalizerPart, TemperaturePart
from openclip_ext.losses.options import HARD_SHARE, SHARED_OPTIONS, Option, rho_of

# The parts that come with the machinery.
_SHARED_PARTS = (
    NormalizerPart("minibatch", MinibatchNormalizer, objective=Contrastive),
    TemperaturePart("constant", ConstantTemperature),
    TemperaturePart("global", GlobalTemperature),
    # Of two parts with the same name a loss takes the one that its objective allows.
    TemperaturePart("global", UnregularizedTemperature),
    # The embeddings of a young model lie close together: to spread them a temperature would go to any lower bound.
    TemperaturePart("solved", SolvedTemperature, {"rho": 5.0, "temperature_min": 0.03}),
)


def _discover_methods() -> Iterator[Method]:
    """The ``METHOD``, or ``METHODS``, of each file in this folder."""
    for module in pkgutil.iter_modules(losses.__path__):
        contents = vars(importlib.import_module(f"{losses.__name__}.{module.name}"))
        yield from contents.get("METHODS", ())
        if "METHOD" in contents:
            yield contents["METHOD"]


METHODS: dict[str, Method] = {
    method.name: method for method in sorted(_discover_methods(), key=lambda method: method.name)
}
_PARTS = [*_SHARED_PARTS, *(part for method in METHODS.values() for part in method.parts)]
_NORMALIZERS = [part for part in _PARTS if isinstance(part, NormalizerPart)]
_TEMPERATURES = [part for part in _PARTS if isinstance(part, TemperaturePart)]
NORMALIZER_NAMES = tuple(dict.fromkeys(part.name for part in _NORMALIZERS))
TEMPERATURE_SCHEME_NAMES = tuple(dict.fromkeys(part.name for part in _TEMPERATURES))
_COMPOSITION_OPTIONS = (
    Option(
        "normalizer",
        str,
        None,
        "estimator of the log-normalizers (default: the loss's own)",
        choices=NORMALIZER_NAMES,
        nullable=True,
    ),
    Option(
        "temperature_scheme",
        str,
        None,
        "where the temperature comes from (default: the loss's own)",
        choices=TEMPERATURE_SCHEME_NAMES,
        nullable=True,
    ),
)
OPTIONS: dict[str, Option] = {
    option.name: option
    for options in (_COMPOSITION_OPTIONS, SHARED_OPTIONS, *(method.options for method in METHODS.values()))
    for option in options
}
_REQUIREMENTS = {
    "embed_dim": "the width of the model's embeddings",
    "num_samples": "the number of training samples, the size of the index space (the manifest's)",
}


def list_losses() -> list[str]:
    """The names that :func:`create_loss` and ``--loss`` take."""
    return list(METHODS)


def create_loss(
    name: str, embed_dim: int | None = None, num_samples: int | None = None, **options: Any
) -> ContrastiveLoss:
    """Create a loss.

    Args:
        name: one of :func:`list_losses`.
        embed_dim: width of the embeddings; needed by losses with a network or prototypes, ignored by others.
        num_samples: size of the index space; needed by losses that keep state for each sample, ignored by others.
        options: see :data:`OPTIONS`; all have a default. ``hard_share`` is another way to say ``rho``: ``exp(−ρ)``.

    Returns:
        A module whose call is ``loss(image_features, text_features, logit_scale, index=index, output_dict=True)``.

    Raises:
        ValueError: an unknown loss, an option that no part of this loss uses, a value out of range, parts that make no loss
            together, or a missing ``embed_dim`` or ``num_samples``.

    Example:
        >>> loss = create_loss("neuclip", embed_dim=512, prototypes=1024)
        >>> terms = loss(image_features, text_features, logit_scale, output_dict=True)
        >>> sum(terms.values()).backward()
    """
    options = _with_rho(options)
    composition = _compose(name, options.get("normalizer"), options.get("temperature_scheme"), options.get("views"))
    defaults = composition.defaults()
    unused = sorted(set(options) - set(defaults))
    if unused:
        reasons = "".join(f". {composition.refused[option]}" for option in unused if option in composition.refused)
        raise ValueError(
            f"{', '.join(f'{option}=' for option in unused)}: not used by the loss {composition.title!r}, which takes "
            f"{', '.join(sorted(defaults))}{reasons}"
        )
    values = defaults | {option: OPTIONS[option].check(value) for option, value in options.items()}
    if "temperature" in options:
        _check_temperature(values["temperature"], values)
    if values.get("rho_end", 0) is None and values["rho_switch"] != defaults["rho_switch"]:
        raise ValueError("rho_switch=: no effect without rho_end=, the value that rho switches to; give both, or none")
    sizes = _check_sizes(composition, {"embed_dim": embed_dim, "num_samples": num_samples})
    return composition.build(values, sizes)


def options_used_by(
    name: str, normalizer: str | None = None, temperature_scheme: str | None = None, views: int | None = None
) -> dict[str, Any]:
    """The options of a loss, with the defaults that they have there.

    Args:
        name: one of :func:`list_losses`.
        normalizer, temperature_scheme: parts other than the loss's own.
        views: 2 for the loss of that name on two views of each image.

    Raises:
        ValueError: as :func:`create_loss`.
    """
    return _compose(name, normalizer, temperature_scheme, views).defaults()


def why_refused(
    option: str,
    name: str,
    normalizer: str | None = None,
    temperature_scheme: str | None = None,
    views: int | None = None,
) -> str:
    """Why a loss does not take an option that it could be expected to take; empty: there is no more to say."""
    return _compose(name, normalizer, temperature_scheme, views).refused.get(option, "")


def requirements_of(
    name: str, normalizer: str | None = None, temperature_scheme: str | None = None, views: int | None = None
) -> set[str]:
    """Which of ``embed_dim`` and ``num_samples`` a loss needs."""
    return _compose(name, normalizer, temperature_scheme, views).keywords() & _REQUIREMENTS.keys()


@dataclass(frozen=True)
class _Composition:
    """The classes that a loss is built from, with their arguments' defaults.

    Attributes:
        title: for messages.
        classes: a whole loss; or objective, normalizer and temperature scheme.
        option_defaults: over the options' own defaults.
        part_names: the options that name its parts, with their values.
        fixed: arguments that are no options.
        refused: options that it could be expected to take, with the reason why it does not.
    """

    title: str
    classes: tuple[type, ...]
    option_defaults: dict[str, Any]
    part_names: dict[str, Any] = field(default_factory=dict)
    fixed: dict[str, Any] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)

    def keywords(self) -> set[str]:
        """Keyword-only arguments of all classes."""
        return set().union(*(_keywords(cls) for cls in self.classes))

    def defaults(self) -> dict[str, Any]:
        """The options that the classes take, with their defaults."""
        keywords = self.keywords()
        values = {name: option.default for name, option in OPTIONS.items() if name in keywords}
        return self.part_names | values | self.option_defaults

    def build(self, values: dict[str, Any], sizes: dict[str, int | None]) -> ContrastiveLoss:
        """Build the loss from values of all its options."""
        arguments = values | sizes | self.fixed
        built = [cls(**{name: arguments[name] for name in _keywords(cls) & arguments.keys()}) for cls in self.classes]
        if len(built) == 1:
            return built[0]
        needed = self.keywords() & sizes.keys()
        embed_dim, num_samples = (sizes[name] if name in needed else None for name in ("embed_dim", "num_samples"))
        objective, normalizer, temperature = built
        equal_captions = arguments["equal_captions"]
        return GlobalContrastiveLoss(
            objective, normalizer, temperature, embed_dim, num_samples, equal_captions=equal_captions
        )


def _compose(name: str, normalizer: str | None, temperature_scheme: str | None, views: int | None) -> _Composition:
    method = _find_method(name)
    two_views = views is not None and OPTIONS["views"].check(views) == 2
    if two_views and method.two_views is None:
        others = ", ".join(other.name for other in METHODS.values() if other.two_views is not None)
        raise ValueError(
            f"{name} with views={views}: it compares images with texts; losses of two views of an image are {others}"
        )
    whole = method.two_views if two_views else method.whole
    asked_for_parts = bool(normalizer or temperature_scheme)
    if whole is None or (asked_for_parts and method.normalizer and not two_views):
        return _compose_parts(method, normalizer, temperature_scheme)
    title = f"{name} with views={views}" if two_views else name
    if asked_for_parts:
        given = "normalizer" if normalizer else "temperature_scheme"
        raise ValueError(f"{given}: not used by the loss {title!r}, which is not made of such parts")
    return _Composition(title, (whole.build,), whole.defaults, refused=whole.refused)


def _with_rho(options: dict[str, Any]) -> dict[str, Any]:
    """The options with ``rho`` for ``hard_share``."""
    if "hard_share" not in options:
        return options
    if "rho" in options:
        raise ValueError("rho= and hard_share= say the same: give one of them")
    share = HARD_SHARE.check(options["hard_share"])
    return {name: value for name, value in options.items() if name != "hard_share"} | {"rho": rho_of(share)}


def _find_method(name: str) -> Method:
    if name in METHODS:
        return METHODS[name]
    close = difflib.get_close_matches(str(name), METHODS, n=1)
    hint = f" Did you mean {close[0]!r}?" if close else ""
    raise ValueError(f"unknown loss {name!r}: expected one of {', '.join(METHODS)}.{hint}")


def _compose_parts(method: Method, normalizer: str | None, temperature_scheme: str | None) -> _Composition:
    names = {
        "normalizer": OPTIONS["normalizer"].check(normalizer) or method.normalizer,
        "temperature_scheme": OPTIONS["temperature_scheme"].check(temperature_scheme) or method.temperature_scheme,
    }
    own_normalizer = names["normalizer"] == method.normalizer
    own_temperature = names["temperature_scheme"] == method.temperature_scheme
    title = method.name
    if not (own_normalizer and own_temperature):
        title += f" with normalizer {names['normalizer']}, temperature scheme {names['temperature_scheme']}"
    objective, normalizer_part, temperature_part = _compatible_parts(method, title, *names.values())
    option_defaults = normalizer_part.defaults | temperature_part.defaults
    if own_normalizer:
        option_defaults |= method.normalizer_defaults
    if own_temperature:
        option_defaults |= method.temperature_defaults
    return _Composition(
        title=title,
        classes=(objective, normalizer_part.build, temperature_part.build),
        option_defaults=option_defaults,
        part_names=names | {"equal_captions": NEGATIVE} | ({"views": 1} if method.two_views is not None else {}),
        fixed=method.fixed,
    )


def _compatible_parts(
    method: Method, title: str, normalizer: str, temperature_scheme: str
) -> tuple[type[Objective], NormalizerPart, TemperaturePart]:
    """The parts with these names that go with the method's objective.

    Raises:
        ValueError: there are none, with the reason.
    """
    reason = None
    for normalizer_part in (part for part in _NORMALIZERS if part.name == normalizer):
        objective = method.objective or normalizer_part.objective
        for temperature_part in (part for part in _TEMPERATURES if part.name == temperature_scheme):
            reason = incompatibility(objective, normalizer_part.build, temperature_part.build)
            if reason is None:
                return objective, normalizer_part, temperature_part
    others = [other.name for other in METHODS.values() if other.whole is None and other.objective is None]
    raise ValueError(f"{title}: {reason}. Losses that take these parts: {', '.join(others)}")


def _keywords(build: type) -> set[str]:
    """Names of a class's keyword-only arguments, including those that it hands to its base class."""
    names: set[str] = set()
    for cls in inspect.getmro(build):
        parameters = inspect.signature(getattr(cls, "__init__")).parameters.values()  # noqa: B009
        names |= {parameter.name for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY}
        if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
            break
    return names


def _check_temperature(temperature: float | None, values: dict[str, Any]) -> None:
    """Raise ValueError if a temperature that was given starts outside of its bounds, as a logit scale would."""
    if temperature is None:
        return
    smallest = values.get("temperature_min")
    largest = values.get("temperature_max", OPTIONS["temperature_max"].default)
    if temperature > largest:
        logit_scale = f". For a logit scale of {temperature:g} give temperature={1 / temperature:.4g}"
        raise ValueError(
            f"temperature={temperature:g}: expected at most {largest:g}, as it divides the similarities"
            f"{logit_scale if temperature > 1 else ''}"
        )
    if smallest is not None and temperature < smallest <= largest:
        raise ValueError(
            f"temperature={temperature:g} is smaller than temperature_min={smallest:g}: it could not start there; change one"
        )


def _check_sizes(composition: _Composition, sizes: dict[str, int | None]) -> dict[str, int | None]:
    """Raise ValueError unless the sizes that the loss needs are positive integers."""
    for name in sorted(composition.keywords() & _REQUIREMENTS.keys()):
        value = sizes[name]
        if value is None:
            raise ValueError(f"the loss {composition.title!r} needs {name}=, {_REQUIREMENTS[name]}")
        if isinstance(value, bool) or int(value) != value or value < 1:
            raise ValueError(f"{name}={value!r}: expected a positive integer, {_REQUIREMENTS[name]}")
    return sizes
