"""Create losses by name: collect the METHODs of the files in this folder, and compose their parts."""

import importlib
import inspect
import itertools
import os
import pkgutil
import sys
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from openclip_ext import losses
from openclip_ext.cli.options import OptionError
from openclip_ext.contrastive.equal_captions import NEGATIVE
from openclip_ext.contrastive.global_loss import GlobalContrastiveLoss, incompatibility
from openclip_ext.contrastive.loss import ContrastiveLoss
from openclip_ext.contrastive.normalizer import MinibatchNormalizer
from openclip_ext.contrastive.objectives import FastCLIPObjective, Objective
from openclip_ext.contrastive.solved_temperature import SolvedTemperature
from openclip_ext.contrastive.temperature import (
    ConstantTemperature,
    GlobalTemperature,
    TwoGlobalTemperatures,
    UnregularizedTemperature,
)
from openclip_ext.losses.method import Method, NormalizerPart, TemperaturePart
from openclip_ext.losses.options import (
    HARD_SHARE,
    OPTIONS,
    PACKAGE_OPTIONS,
    REFERENCE_OPTIONS,
    SUMMARIES,
    refuse_unknown_loss,
    rho_of,
)

Part = TypeVar("Part", NormalizerPart, TemperaturePart)

# The parts that belong to no method.
_SHARED_PARTS = (
    NormalizerPart("minibatch", MinibatchNormalizer, objective=FastCLIPObjective),
    TemperaturePart("constant", ConstantTemperature),
    TemperaturePart("global", GlobalTemperature),
    # A loss takes the first part of a name that its objective allows.
    TemperaturePart("global", UnregularizedTemperature),
    TemperaturePart("two-global", TwoGlobalTemperatures, {"temperature": 0.07, "lr_tau": 2e-4}),
    # The embeddings of a young model lie close together, which would drive a temperature to any lower bound. A short run is
    # over before the temperature has gone far, and does best at a high one; a long one gains from a lower start.
    TemperaturePart(
        "solved", SolvedTemperature, {"rho": 4.0, "temperature": 0.1, "temperature_min": 0.03}, {"temperature": 0.07}
    ),
)
_LONG_RUN_STEPS = 700

_REQUIREMENTS = {
    "embed_dim": "the width of the model's embeddings",
    "num_samples": "the number of training samples, the size of the index space (the manifest's)",
}

# Width and number of samples of a loss that is built only to check its options.
_SMALL = 8

# All losses by name. :func:`register_method` adds to them, and to :data:`openclip_ext.losses.options.OPTIONS`.
METHODS: dict[str, Method] = {}


def _discover_methods() -> Iterator[Method]:
    """Yield the ``METHOD``, or ``METHODS``, of each file in this folder."""
    for info in pkgutil.iter_modules(losses.__path__):
        contents = vars(importlib.import_module(f"{losses.__name__}.{info.name}"))
        yield from (*contents.get("METHODS", ()), *([contents["METHOD"]] if "METHOD" in contents else []))


def _parts(kind: type[Part], name: str | None = None) -> list[Part]:
    """Return the normalizers or the temperature schemes that losses can be composed of, of one name if it is given."""
    parts = itertools.chain(_SHARED_PARTS, *(method.parts for method in METHODS.values()))
    return [part for part in parts if isinstance(part, kind) and name in (None, part.name)]


def _collect_options() -> None:
    """Bring the options up to date with the methods."""
    for name, parts in (("normalizer", _parts(NormalizerPart)), ("temperature_scheme", _parts(TemperaturePart))):
        choices = (*(OPTIONS[name].choices or ()), *(part.name for part in parts))
        OPTIONS[name] = replace(OPTIONS[name], choices=tuple(dict.fromkeys(choices)))
    OPTIONS.update({option.name: option for method in METHODS.values() for option in method.options})


METHODS.update({method.name: method for method in sorted(_discover_methods(), key=lambda method: method.name)})
_collect_options()


def register_method(method: Method) -> None:
    """Add a loss from outside of this package (``docs/add-your-own-loss.md``). The same name again replaces it.

    Raises:
        ValueError: The name is one of this package's losses, or an option is already there with another meaning.
    """
    if method.name in SUMMARIES:
        raise ValueError(f"there is already a loss {method.name!r} in openclip_ext: give yours another name")
    others = {name: other for name, other in METHODS.items() if name != method.name}
    known = {option.name: option for other in others.values() for option in other.options}
    known |= {option.name: option for option in (*PACKAGE_OPTIONS, HARD_SHARE)}
    for option in method.options:
        if known.get(option.name, option) != option:
            raise ValueError(
                f"option {option.name!r} of the loss {method.name!r} is already there, with another meaning"
            )
    METHODS[method.name] = method
    _collect_options()


def find_method(name: str) -> Method:
    """Return the method of a loss: one of :func:`list_losses`, or ``my.module:METHOD``, which is imported and registered.

    Raises:
        OptionError: There is no such loss, or no such module.
    """
    if ":" in str(name):
        return _import_method(name)
    refuse_unknown_loss(name, METHODS)
    return METHODS[name]


def _import_method(name: str) -> Method:
    module_name, _, attribute = name.partition(":")
    if "" not in sys.path and os.getcwd() not in sys.path:
        # An installed program does not look there by itself; python -m does.
        sys.path.append(os.getcwd())
    try:
        method = getattr(importlib.import_module(module_name), attribute, None)
    except ModuleNotFoundError as error:
        raise OptionError("loss", f"loss {name!r}: {error}; looked in {', '.join(filter(None, sys.path))}") from error
    if not isinstance(method, Method):
        found = (
            "not there"
            if method is None
            else f"of type {type(method).__name__}"
            if method is not Method
            else "the class"
        )
        names = [key for key, value in vars(sys.modules[module_name]).items() if isinstance(value, Method)]
        there = f"; it has {', '.join(names)}" if names else ""
        raise OptionError(
            "loss", f"loss {name!r}: expected a Method object of {module_name}, {attribute!r} is {found}{there}"
        )
    if METHODS.get(method.name) is not method:
        register_method(method)
    return method


def list_losses() -> list[str]:
    """Return the names that :func:`create_loss` and ``--loss`` take."""
    return list(METHODS)


def create_loss(
    name: str,
    embed_dim: int | None = None,
    num_samples: int | None = None,
    reference_dim: int | None = None,
    **options: Any,
) -> ContrastiveLoss:
    """Create a loss.

    Args:
        name: one of :func:`list_losses`; or ``my.module:METHOD``, a loss of one's own.
        embed_dim: width of the embeddings; needed by losses with a network or prototypes, ignored by others.
        num_samples: size of the index space; needed by losses that keep state for each sample, ignored by others.
        reference_dim: width of the embeddings of a reference model, which each call then takes as ``reference=(image, text)``;
            None: there is none. The loss is then composed of parts, ``openclip``, too.
        options: see :data:`OPTIONS`; all have a default. ``hard_share`` sets ``rho`` by ``exp(−ρ)``.

    Returns:
        A module whose call is ``loss(image_features, text_features, logit_scale, index=index, output_dict=True)``.

    Raises:
        OptionError: an unknown loss, an option that no part of this loss uses, a value out of range, or parts that do not
            fit together; a ValueError.
        ValueError: a missing ``embed_dim`` or ``num_samples``.

    Example:
        >>> loss = create_loss("neuclip", embed_dim=512, prototypes=1024)
        >>> terms = loss(image_features, text_features, logit_scale, output_dict=True)
        >>> sum(terms.values()).backward()
    """
    if reference_dim is not None:
        options = {"steer": True, **options}
    composition, values = _checked_values(name, options)
    if composition.has_reference and reference_dim is None:
        given = min(REFERENCE_OPTIONS & options.keys())
        raise OptionError(
            given, f"{given}=: only with a reference model; give reference_dim=, the width of its embeddings"
        )
    sizes = {"embed_dim": embed_dim, "num_samples": num_samples}
    for size in sorted(composition.keywords() & sizes.keys()):
        value = sizes[size]
        if value is None:
            raise ValueError(f"the loss {composition.title!r} needs {size}=, {_REQUIREMENTS[size]}")
        if isinstance(value, bool) or int(value) != value or value < 1:
            raise ValueError(f"{size}={value!r}: expected a positive integer, {_REQUIREMENTS[size]}")
    return composition.create(values, sizes, reference_dim or 0)


def check_options(name: str, **options: Any) -> ContrastiveLoss:
    """Check a loss's options before its sizes are known; raise OptionError as :func:`create_loss`.

    Returns:
        The loss with small sizes and tables, which tells what it needs (``needs_index``, ...).
    """
    composition, values = _checked_values(name, options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return composition.create(values, dict.fromkeys(_REQUIREMENTS, _SMALL), _SMALL * composition.has_reference)


def options_used_by(name: str, **options: Any) -> dict[str, Any]:
    """Return the options of a loss with their defaults; raise OptionError as :func:`create_loss`.

    Args:
        name: as for :func:`create_loss`.
        options: those that choose its parts (``normalizer``, ``temperature_scheme``, ``views``); others have no effect.
    """
    return _compose(name, options).defaults()


def training_defaults(name: str, given: Mapping[str, Any], steps: int = 0, pretrained: bool = False) -> dict[str, Any]:
    """Return the options of a loss with their defaults in the training program, some of which are not :func:`create_loss`'s.

    Where a training has another temperature scheme than the paper, any option of the paper's among those given keeps it.

    Args:
        name: as for :func:`create_loss`.
        given: the options that the user gave.
        steps: optimizer steps of the whole training.
        pretrained: whether the model brings a temperature, from which the paper's scheme starts.
    """
    composition, scheme = _compose(name, given), find_method(name).training_scheme
    if scheme and not pretrained and not given.keys() & {*_keywords(composition.parts[-1]), *composition.part_names}:
        composition = _compose(name, {**given, "temperature_scheme": scheme})
    of_length = composition.long_run_defaults if steps >= _LONG_RUN_STEPS else {}
    return composition.defaults() | composition.training_defaults | of_length


@dataclass(frozen=True)
class _Composition:
    """The classes that a loss is built from, with their arguments' defaults.

    Attributes:
        title: the loss's name in messages.
        build: the loss's class.
        parts: the classes of its objective, its normalizer and its temperature scheme, if any.
        option_defaults: defaults that differ from the options' own.
        part_names: the options that name its parts, with their values.
        has_reference: whether each call gets a reference model's embeddings.
        fixed, refused, training_defaults, long_run_defaults: as in ``method.py``.
    """

    title: str
    build: type[ContrastiveLoss]
    parts: tuple[type, ...]
    option_defaults: dict[str, Any]
    part_names: dict[str, Any] = field(default_factory=dict)
    has_reference: bool = False
    fixed: dict[str, Any] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    training_defaults: dict[str, Any] = field(default_factory=dict)
    long_run_defaults: dict[str, Any] = field(default_factory=dict)

    def keywords(self) -> set[str]:
        """Return the keyword-only arguments of all classes."""
        found = set().union(*(_keywords(cls) for cls in (self.build, *self.parts)))
        return found if self.has_reference else found - REFERENCE_OPTIONS

    def defaults(self) -> dict[str, Any]:
        """Return the options that the classes take, with their defaults."""
        keywords = self.keywords()
        values = {name: self.option_defaults.get(name, option.default) for name, option in OPTIONS.items()}
        return self.part_names | {name: value for name, value in values.items() if name in keywords}

    def create(
        self, values: dict[str, Any], sizes: Mapping[str, int | None], reference_dim: int = 0
    ) -> ContrastiveLoss:
        """Build the loss from values of all its options."""
        arguments = {**values, **sizes, **self.fixed}
        in_features = reference_dim if values.get("steer") else 0  # its parts then see features of two blocks

        def build(cls: type, *parts: Any, **more: Any) -> Any:
            return cls(
                *parts, **more, **{name: arguments[name] for name in _keywords(cls) & arguments.keys() - more.keys()}
            )

        # The loss knows the sizes that its parts need.
        sizes = {name: arguments[name] if name in self.keywords() else None for name in _REQUIREMENTS}
        taken = inspect.signature(self.build).parameters
        wide = {"embed_dim": (sizes["embed_dim"] or 0) + in_features, "reference_dim": in_features}
        parts = [build(part, **{name: wide[name] for name in _keywords(part) & wide.keys()}) for part in self.parts]
        if reference_dim:
            sizes["reference_dim"] = reference_dim
        return build(self.build, *parts, **{name: size for name, size in sizes.items() if name in taken})


def _compose(name: str, options: Mapping[str, Any]) -> _Composition:
    """Find what a loss with these options is built from."""
    method = find_method(name)
    given = [part for part in ("normalizer", "temperature_scheme") if options.get(part)]
    given += sorted(REFERENCE_OPTIONS & options.keys())
    views = options.get("views")
    two_views = views is not None and OPTIONS["views"].check(views) == 2
    if two_views and method.two_views is None:
        others = ", ".join(other.name for other in METHODS.values() if other.two_views is not None)
        raise OptionError(
            "views",
            f"views={views}: {method.name} compares images with texts; losses of two views of an image are {others}",
        )
    whole = method.two_views if two_views else method.whole
    if whole is None or (given and method.normalizer and not two_views):
        return _compose_parts(method, options)
    title = f"{method.name} with views={views}" if two_views else method.name
    if given:
        what = "a reference model" if given[0] in REFERENCE_OPTIONS else f"{given[0]}="
        raise OptionError(given[0], f"{what}: not used by the loss {title!r}, which is not made of such parts")
    return _Composition(title, whole.build, whole.parts, whole.defaults, refused=whole.refused)


def _with_rho(options: dict[str, Any]) -> dict[str, Any]:
    """Return the options with ``rho`` for ``hard_share``."""
    if "hard_share" not in options:
        return options
    if "rho" in options:
        raise OptionError("rho", "rho= and hard_share= say the same: give one of them")
    share = HARD_SHARE.check(options["hard_share"])
    return {name: value for name, value in options.items() if name != "hard_share"} | {"rho": rho_of(share)}


def _compose_parts(method: Method, options: Mapping[str, Any]) -> _Composition:
    names = {
        "normalizer": OPTIONS["normalizer"].check(options.get("normalizer")) or method.normalizer,
        "temperature_scheme": OPTIONS["temperature_scheme"].check(options.get("temperature_scheme"))
        or method.temperature_scheme,
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
    own = method.temperature_defaults if own_temperature else {}
    return _Composition(
        title=title,
        build=GlobalContrastiveLoss,
        parts=(objective, normalizer_part.build, temperature_part.build),
        option_defaults=option_defaults,
        has_reference=bool(REFERENCE_OPTIONS & options.keys()),
        part_names=names | {"equal_captions": NEGATIVE} | ({"views": 1} if method.two_views is not None else {}),
        fixed=method.fixed,
        training_defaults=method.training_defaults if own_normalizer else {},
        long_run_defaults={
            name: value for name, value in temperature_part.long_run_defaults.items() if name not in own
        },
    )


def _compatible_parts(
    method: Method, title: str, normalizer: str, temperature_scheme: str
) -> tuple[type[Objective], NormalizerPart, TemperaturePart]:
    """Return the parts with these names that fit the method's objective; raise OptionError if there are none."""
    reason = None
    for normalizer_part in _parts(NormalizerPart, normalizer):
        objective = method.objective or normalizer_part.objective
        for temperature_part in _parts(TemperaturePart, temperature_scheme):
            reason = incompatibility(objective, normalizer_part.build, temperature_part.build)
            if reason is None:
                return objective, normalizer_part, temperature_part
    others = [other.name for other in METHODS.values() if other.whole is None and other.objective is None]
    option = "normalizer" if normalizer != method.normalizer else "temperature_scheme"
    raise OptionError(option, f"{title}: {reason}. Losses that take these parts: {', '.join(others)}")


def _keywords(build: type) -> set[str]:
    """Return the names of a class's keyword-only arguments, and of those that it passes on to its base class."""
    names: set[str] = set()
    for cls in inspect.getmro(build):
        parameters = inspect.signature(getattr(cls, "__init__")).parameters.values()  # noqa: B009
        names |= {parameter.name for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY}
        if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
            break
    return names


def _checked_values(name: str, options: dict[str, Any]) -> tuple[_Composition, dict[str, Any]]:
    """Return what a loss is built from, and the values of all its options; raise OptionError for the first wrong one."""
    options = _with_rho(options)
    composition = _compose(name, options)
    defaults = composition.defaults()
    unused = sorted(set(options) - set(defaults))
    if unused:
        reasons = "".join(f". {composition.refused[option]}" for option in unused if option in composition.refused)
        takes = ", ".join(f"{option}=" for option in sorted(defaults))
        raise OptionError(
            unused[0],
            f"{', '.join(f'{option}=' for option in unused)}: not used by the loss {composition.title!r}, which takes "
            f"{takes}{reasons}",
        )
    values = defaults | {option: OPTIONS[option].check(value) for option, value in options.items()}
    if options.get("temperature") is not None:
        _check_temperature(values["temperature"], values)
    if values.get("rho_end", 0) is None and values["rho_switch"] != defaults["rho_switch"]:
        raise OptionError(
            "rho_switch", "rho_switch=: no effect without rho_end=, the value that rho switches to; give both, or none"
        )
    return composition, values


def _check_temperature(temperature: float, values: dict[str, Any]) -> None:
    """Raise OptionError if a given temperature is outside of its bounds, as a logit scale would be."""
    smallest = values.get("temperature_min")
    largest = values.get("temperature_max", OPTIONS["temperature_max"].default)
    if temperature > largest:
        hint = (
            f". For a logit scale of {temperature:g} give temperature={1 / temperature:.4g}" if temperature > 1 else ""
        )
        raise OptionError(
            "temperature",
            f"temperature={temperature:g}: expected at most {largest:g}, as it divides the similarities{hint}",
        )
    if smallest is not None and temperature < smallest <= largest:
        raise OptionError(
            "temperature",
            f"temperature={temperature:g} is smaller than temperature_min={smallest:g}: it could not start there; "
            "change one",
        )
