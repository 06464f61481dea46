"""Create losses by name. Each file in this folder declares its losses in ``METHOD`` or ``METHODS``."""

import contextlib
import importlib
import inspect
import itertools
import os
import pkgutil
import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch

from openclip_ext import losses
from openclip_ext.cli.options import Option, OptionError
from openclip_ext.contrastive.equal_captions import NEGATIVE
from openclip_ext.contrastive.global_loss import GlobalContrastiveLoss, incompatibility
from openclip_ext.contrastive.loss import ContrastiveLoss
from openclip_ext.contrastive.normalizer import MinibatchNormalizer
from openclip_ext.contrastive.objectives import FastCLIPObjective, Objective
from openclip_ext.contrastive.solved_temperature import SolvedTemperature
from openclip_ext.contrastive.temperature import (
    ConstantTemperature,
    GlobalTemperature,
    UnregularizedTemperature,
)
from openclip_ext.losses.method import Method, NormalizerPart, TemperaturePart, WholeLoss
from openclip_ext.losses.options import (
    HARD_SHARE,
    OPTIONS,
    PACKAGE_OPTIONS,
    PARTS,
    REFERENCE_OPTIONS,
    SUMMARIES,
    refuse_unknown_loss,
    rho_of,
)

Part = TypeVar("Part", NormalizerPart, TemperaturePart)

# Parts that do not belong to a method.
_SHARED_PARTS = (
    NormalizerPart("minibatch", MinibatchNormalizer, objective=FastCLIPObjective),
    TemperaturePart("constant", ConstantTemperature),
    TemperaturePart("global", GlobalTemperature),
    # Two parts have this name. A loss uses the first part that its objective allows.
    TemperaturePart("global", UnregularizedTemperature),
    # Early in training, embeddings are close together, which moves a solved temperature down to its lower bound. So the lower
    # bound is higher than for other schemes. In a short run, the temperature changes little, and a high initial temperature
    # gives the best results. In a long run, a lower initial temperature is better.
    TemperaturePart(
        "solved", SolvedTemperature, {"rho": 4.0, "temperature": 0.1, "temperature_min": 0.03}, {"temperature": 0.07}
    ),
)
_LONG_RUN_STEPS = 700

_REQUIREMENTS = {
    "embed_dim": "the embedding dimension of the model",
    "num_samples": "the number of training samples",
}

# Embedding dimension and number of samples of a loss that is created only to check options.
_SMALL = 8

# All losses by name. :func:`register_method` adds entries here and in :data:`openclip_ext.losses.options.OPTIONS`.
METHODS: dict[str, Method] = {}


def _discover_methods() -> Iterator[Method]:
    """Yield the methods (``METHOD`` or ``METHODS``) that the files in this folder declare."""
    for info in pkgutil.iter_modules(losses.__path__):
        contents = vars(importlib.import_module(f"{losses.__name__}.{info.name}"))
        yield from (*contents.get("METHODS", ()), *([contents["METHOD"]] if "METHOD" in contents else []))


def _parts(
    kind: type[Part], name: str | None = None, own: Iterable[NormalizerPart | TemperaturePart] = ()
) -> list[Part]:
    """Return all normalizers or all temperature schemes (``kind``), or only those with the given name; ``own`` parts first."""
    parts = itertools.chain(own, _SHARED_PARTS, *(method.parts for method in METHODS.values()))
    return [part for part in parts if isinstance(part, kind) and name in (None, part.name)]


def _collect_options() -> None:
    for name, parts in (("normalizer", _parts(NormalizerPart)), ("temperature_scheme", _parts(TemperaturePart))):
        choices = (*(OPTIONS[name].choices or ()), *(part.name for part in parts))
        OPTIONS[name] = replace(OPTIONS[name], choices=tuple(dict.fromkeys(choices)))
    OPTIONS.update({option.name: option for method in METHODS.values() for option in method.options})


METHODS.update({method.name: method for method in sorted(_discover_methods(), key=lambda method: method.name)})
_collect_options()


def register_method(method: Method) -> None:
    """Add a loss from outside this package (see ``docs/add-your-own-loss.md``), or replace an added loss of the same name.

    Raises:
        ValueError: A loss of this package has this name, or an option exists with another meaning.
    """
    if method.name in SUMMARIES:
        raise ValueError(f"openclip_ext already has a loss {method.name!r}: use another name")
    others = {name: other for name, other in METHODS.items() if name != method.name}
    known = {option.name: option for other in others.values() for option in other.options}
    known |= {option.name: option for option in (*PACKAGE_OPTIONS, HARD_SHARE)}
    for option in method.options:
        if known.get(option.name, option) != option:
            raise ValueError(
                f"option {option.name!r} of the loss {method.name!r} already exists with another meaning: use another name"
            )
    METHODS[method.name] = method
    _collect_options()


def find_method(name: str) -> Method:
    """Return the method of a loss. ``name`` is one of :func:`list_losses`, or ``my.module:METHOD``, which is imported.

    Raises:
        OptionError: The loss or the module does not exist.
    """
    if ":" in str(name):
        return _import_method(name)
    refuse_unknown_loss(name, METHODS)
    return METHODS[name]


def _import_method(name: str) -> Method:
    module_name, _, attribute = name.partition(":")
    if not module_name or module_name.startswith(".") or "/" in module_name or module_name.endswith(".py"):
        plain = module_name.removeprefix("./").removesuffix(".py").replace("/", ".").lstrip(".") or "my.module"
        raise OptionError("loss", f"loss {name!r}: expected a module and its attribute, such as {plain}:METHOD")
    if "" not in sys.path and os.getcwd() not in sys.path:
        # Unlike ``python -m``, an installed program does not add the current folder to the path.
        sys.path.append(os.getcwd())
    try:
        method = getattr(importlib.import_module(module_name), attribute, None)
    except ModuleNotFoundError as error:
        raise OptionError("loss", f"loss {name!r}: {error}. Searched {', '.join(filter(None, sys.path))}") from error
    if not isinstance(method, Method):
        raise OptionError("loss", f"loss {name!r}: expected a Method object, found {method!r}")
    if METHODS.get(method.name) is not method:
        register_method(method)
    return method


def list_losses() -> list[str]:
    """Return the names that :func:`create_loss` and ``--loss`` accept."""
    return list(METHODS)


def create_loss(
    name: str,
    embed_dim: int | None = None,
    num_samples: int | None = None,
    reference_dim: int | None = None,
    steps: int = 0,
    **options: Any,
) -> ContrastiveLoss:
    """Create a loss, with the same defaults as ``openclip-ext train --loss``.

    Args:
        name: A name in :func:`list_losses`, or ``my.module:METHOD`` for your own loss.
        embed_dim: Embedding dimension. Losses with a network or prototypes need it; other losses ignore it.
        num_samples: Number of training samples. Losses with per-sample state need it; other losses ignore it.
        reference_dim: Embedding dimension of a reference model. Each call then needs the reference's embeddings as
            ``reference=(image, text)``. None (default) means no reference model. With a reference model, every loss is
            composed of parts, even ``openclip``.
        steps: Number of optimizer steps of the run. In a long run, a solved temperature starts lower. 0 (default) means a
            short run.
        options: See :data:`OPTIONS`. All have a default. ``hard_share`` sets ``rho``: ``hard_share = exp(−ρ)``.

    Returns:
        A module. Call it as ``loss(image_features, text_features, logit_scale, index=index, output_dict=True)``.

    Raises:
        OptionError: The loss is unknown, it does not use an option, a value is out of range, or the parts are incompatible.
            OptionError is a ValueError.
        ValueError: ``embed_dim`` or ``num_samples`` is missing or is not a positive integer.

    Example:
        >>> loss = create_loss("neuclip", embed_dim=512, prototypes=1024)
        >>> terms = loss(image_features, text_features, logit_scale, output_dict=True)
        >>> sum(terms.values()).backward()
    """
    if reference_dim is not None:
        reference_dim = _checked_size("reference_dim", reference_dim, "the embedding dimension of the reference model")
        options = {"steer": True, **options}
    composition, values = _checked_values(name, options, steps)
    if composition.has_reference and reference_dim is None:
        given = min(REFERENCE_OPTIONS & options.keys())
        raise OptionError(given, f"{given}= needs a reference model: set reference_dim=, its embedding dimension")
    sizes = {"embed_dim": embed_dim, "num_samples": num_samples}
    for size in sorted(composition.keywords() & sizes.keys()):
        if sizes[size] is None:
            raise ValueError(f"the loss {composition.title!r} needs {size}=, {_REQUIREMENTS[size]}")
        sizes[size] = _checked_size(size, sizes[size], _REQUIREMENTS[size])
    loss = composition.create(values, sizes, reference_dim or 0)
    loss.given = frozenset(options)
    return loss


def _checked_size(name: str, value: Any, meaning: str) -> int:
    return Option(name, int, None, "", minimum=1, hint=meaning).check(value)


def check_options(name: str, **options: Any) -> ContrastiveLoss:
    """Create a loss with small sizes, to check its options and read its attributes before the sizes are known.

    Raise OptionError for the same reasons as :func:`create_loss`.
    """
    composition, values = _checked_values(name, options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return composition.create(values, dict.fromkeys(_REQUIREMENTS, _SMALL), _SMALL * composition.has_reference)


def options_used_by(name: str, **options: Any) -> dict[str, Any]:
    """Return all options of a loss with their defaults. Raise OptionError for the same reasons as :func:`create_loss`.

    The result depends only on the options ``normalizer``, ``temperature_scheme`` and ``views``, and on whether there is an
    option of a reference model.
    """
    return _compose(name, options).defaults()


def run_defaults(name: str, given: Mapping[str, Any], steps: int = 0, pretrained: bool = False) -> dict[str, Any]:
    """Return all options of a loss with their defaults in a run, in which some options are ``given``.

    ``steps`` is the number of optimizer steps of the run. If ``pretrained``, the model already has a learned temperature.
    """
    scheme = find_method(name).pretrained_scheme
    if pretrained and scheme and not given.get("temperature_scheme"):
        given = {**given, "temperature_scheme": scheme}
    return _compose(name, given).defaults(steps)


@contextlib.contextmanager
def _wide_default_dtype() -> Iterator[None]:
    """Create tensors in at least float32, although Lightning may have set half precision as the default dtype."""
    dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.promote_types(dtype, torch.float32))
    try:
        yield
    finally:
        torch.set_default_dtype(dtype)


@dataclass(frozen=True)
class _Composition:
    """The classes of a loss with the defaults of their options. ``part_names`` are the options that selected the classes."""

    title: str
    classes: WholeLoss
    part_names: dict[str, Any] = field(default_factory=dict)
    has_reference: bool = False
    fixed: dict[str, Any] = field(default_factory=dict)
    long_run_defaults: dict[str, Any] = field(default_factory=dict)

    def keywords(self) -> set[str]:
        found = set().union(*(_keywords(cls) for cls in (self.classes.build, *self.classes.parts)))
        return found if self.has_reference else found - REFERENCE_OPTIONS

    def defaults(self, steps: int = 0) -> dict[str, Any]:
        """Return all options of the classes with their defaults in a run of this number of optimizer steps."""
        keywords = self.keywords()
        known = self.classes.defaults | (self.long_run_defaults if steps >= _LONG_RUN_STEPS else {})
        values = {name: known.get(name, option.default) for name, option in OPTIONS.items()}
        return self.part_names | {name: value for name, value in values.items() if name in keywords}

    @_wide_default_dtype()
    def create(
        self, values: dict[str, Any], sizes: Mapping[str, int | None], reference_dim: int = 0
    ) -> ContrastiveLoss:
        keywords = self.keywords()
        sizes = {name: sizes[name] if name in keywords else None for name in _REQUIREMENTS}
        of_loss = {**values, **sizes, **self.fixed, "reference_dim": reference_dim}
        # With steering, the features that the parts receive also contain the reference model's embeddings.
        steered = reference_dim if values.get("steer") else 0
        of_parts = of_loss | {"embed_dim": (sizes["embed_dim"] or 0) + steered, "reference_dim": steered}
        return _build(self.classes.build, of_loss, *(_build(part, of_parts) for part in self.classes.parts))


def _build(cls: type, arguments: Mapping[str, Any], *parts: Any) -> Any:
    """Create an object of a class from its parts and from the ``arguments`` that the class accepts."""
    accepted = _keywords(cls) | {*list(inspect.signature(cls).parameters)[len(parts) :]}
    return cls(*parts, **{name: arguments[name] for name in accepted & arguments.keys()})


def _compose(name: str, options: Mapping[str, Any]) -> _Composition:
    method = find_method(name)
    given = [part for part in PARTS if options.get(part)]
    given += sorted(REFERENCE_OPTIONS & options.keys())
    views = options.get("views")
    two_views = views is not None and OPTIONS["views"].check(views) == 2
    if two_views and method.two_views is None:
        others = ", ".join(other.name for other in METHODS.values() if other.two_views is not None)
        raise OptionError("views", f"views={views}: {method.name} compares images with texts. Use one of {others}")
    whole = method.two_views if two_views else method.whole
    if whole is None or (given and method.normalizer and not two_views):
        return _compose_parts(method, options)
    title = f"{method.name} with views={views}" if two_views else method.name
    if given:
        what = "a reference model" if given[0] in REFERENCE_OPTIONS else f"{given[0]}="
        raise OptionError(given[0], f"{what}: not used by the loss {title!r}, whose parts are fixed. Remove it")
    return _Composition(title, whole)


def _with_rho(options: dict[str, Any]) -> dict[str, Any]:
    if "hard_share" not in options:
        return options
    if "rho" in options:
        raise OptionError("rho", "rho= and hard_share= are alternatives: set only one")
    share = HARD_SHARE.check(options["hard_share"])
    return {name: value for name, value in options.items() if name != "hard_share"} | {"rho": rho_of(share)}


def _compose_parts(method: Method, options: Mapping[str, Any]) -> _Composition:
    names = {part: OPTIONS[part].check(options.get(part)) or getattr(method, part) for part in PARTS}
    has_own_normalizer = names["normalizer"] == method.normalizer
    has_own_scheme = names["temperature_scheme"] == method.temperature_scheme
    title = method.name
    if not (has_own_normalizer and has_own_scheme):
        title += f" with normalizer {names['normalizer']}, temperature scheme {names['temperature_scheme']}"
    objective, normalizer, scheme = _compatible_parts(method, title, *names.values())
    of_normalizer = method.normalizer_defaults if has_own_normalizer else {}
    of_scheme = method.temperature_defaults if has_own_scheme else {}
    composition = _Composition(
        title,
        WholeLoss(
            GlobalContrastiveLoss,
            defaults=normalizer.defaults | scheme.defaults | of_normalizer | of_scheme,
            parts=(objective, normalizer.build, scheme.build),
        ),
        has_reference=bool(REFERENCE_OPTIONS & options.keys()),
        part_names=names | {"equal_captions": NEGATIVE} | ({"views": 1} if method.two_views is not None else {}),
        fixed=method.fixed,
        long_run_defaults=scheme.long_run_defaults | of_scheme,
    )
    unused = ", ".join(sorted({**of_normalizer, **of_scheme}.keys() - composition.defaults()))
    if unused and title == method.name:
        raise ValueError(f"the METHOD of the loss {title!r} has a default for {unused}, which the loss does not use")
    return composition


def _compatible_parts(
    method: Method, title: str, normalizer: str, temperature_scheme: str
) -> tuple[type[Objective], NormalizerPart, TemperaturePart]:
    """Return the parts with these names that the method's objective allows; raise OptionError if there are no such parts."""
    reason = None
    for normalizer_part in _parts(NormalizerPart, normalizer, method.parts):
        objective = method.objective or normalizer_part.objective
        for temperature_part in _parts(TemperaturePart, temperature_scheme, method.parts):
            reason = incompatibility(objective, normalizer_part.build, temperature_part.build)
            if reason is None:
                return objective, normalizer_part, temperature_part
    others = [other.name for other in METHODS.values() if other.whole is None and other.objective is None]
    option = "normalizer" if normalizer != method.normalizer else "temperature_scheme"
    reason = reason or f"found no normalizer {normalizer!r} with a temperature scheme {temperature_scheme!r}"
    raise OptionError(option, f"{title}: {reason}. Losses that take these parts: {', '.join(others)}")


def _keywords(build: type) -> set[str]:
    """Return the names of a class's keyword-only arguments, including those that it passes on to base classes."""
    names: set[str] = set()
    for cls in inspect.getmro(build):
        parameters = inspect.signature(getattr(cls, "__init__")).parameters.values()  # noqa: B009
        names |= {parameter.name for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY}
        if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
            break
    return names


def _part_that_uses(name: str, options: Mapping[str, Any], unused: Sequence[str]) -> str:
    """Return a text with the parts with which a loss uses the ``unused`` options, or an empty text."""
    for part in PARTS[::-1]:
        if options.get(part):
            continue
        usable = []
        for choice in OPTIONS[part].choices or ():
            with contextlib.suppress(OptionError):
                if set(unused) <= _compose(name, {**options, part: choice}).defaults().keys():
                    usable.append(choice)
        if usable:
            others = f" (or {', '.join(usable[1:])})" if usable[1:] else ""
            return f"only with {part}={usable[0]}{others}"
    return ""


def _checked_values(name: str, options: dict[str, Any], steps: int = 0) -> tuple[_Composition, dict[str, Any]]:
    """Return the classes of a loss and the values of all its options. Raise OptionError for a wrong option."""
    options = _with_rho(options)
    composition = _compose(name, options)
    defaults = composition.defaults(steps)
    unused = sorted(set(options) - set(defaults))
    if unused:
        takes = ", ".join(f"{option}=" for option in sorted(defaults))
        explained = _part_that_uses(name, options, unused) or f"which takes {takes}"
        found = ", ".join(f"{option}=" for option in unused)
        raise OptionError(unused[0], f"{found}: not used by the loss {composition.title!r}, {explained}")
    # The defaults of an own METHOD may be wrong, too.
    values = {option: OPTIONS[option].check(value) for option, value in (defaults | options).items()}
    if values.get("rho_end", 0) is None and options.get("rho_switch") not in (None, defaults["rho_switch"]):
        raise OptionError("rho_switch", "rho_switch=: no effect without rho_end=, the value of rho after the switch")
    lowest = values.get("temperature_min", 0.0)
    highest = values.get("temperature_max", OPTIONS["temperature_max"].default)
    if options.get("temperature") is not None and not lowest <= values["temperature"] <= highest:
        found = f"temperature={values['temperature']:g}"
        raise OptionError("temperature", f"{found}: expected a temperature from {lowest:g} to {highest:g}")
    return composition, values
