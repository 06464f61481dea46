"""Create losses by name."""

import contextlib
import importlib
import os
import pkgutil
import sys
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from openclip_ext import losses
from openclip_ext.cli.options import Option, OptionError
from openclip_ext.losses.method import Composed, Method, ReferencePart, Sizes, TwoViews, imported, options_of
from openclip_ext.losses.options import (
    CHOICES,
    HARD_SHARE,
    OPTIONS,
    PACKAGE_METHODS,
    PARTS,
    REFERENCE_OPTIONS,
    add_options,
    refuse_unknown_loss,
    rho_of,
)

if TYPE_CHECKING:
    from openclip_ext.contrastive.loss import ContrastiveLoss

_REQUIREMENTS = {
    "embed_dim": "the embedding dimension of the model",
    "num_samples": "the number of training samples",
}
# Embedding dimension and number of samples of a loss that is created only to check options.
_SMALL = 8

# All losses by name. :func:`register_method` adds entries here and in :data:`openclip_ext.losses.options.OPTIONS`.
METHODS: dict[str, Method] = dict(PACKAGE_METHODS)

# The files in this folder. Other files in it, from contributors, declare their loss in ``METHOD``.
_FILES = frozenset(
    {"amorlip", "cliplite", "fastclip", "heads", "isogclr", "method", "neuclip", "openclip", "options", "queueclip"}
    | {"registry", "scent", "simclr", "sogclr", "tempnet"}
)


def register_method(method: Method) -> None:
    """Add a loss from outside this package (see ``docs/add-your-own-loss.md``), or replace an added loss of the same name.

    Raises:
        ValueError: A loss of this package has this name, or an option exists with another meaning.
    """
    if method.name in PACKAGE_METHODS:
        raise ValueError(f"openclip_ext already has a loss {method.name!r}: use another name")
    for part in method.flattened():
        for name, option in options_of(type(part)).items():
            known = HARD_SHARE if name == HARD_SHARE.name else OPTIONS.get(name, option)
            if replace(known, default=None) != replace(option, default=None):
                raise ValueError(
                    f"option {name!r} of the loss {method.name!r} already exists with another meaning: use another name"
                )
    METHODS[method.name] = method
    for chosen in method.nested().values():
        CHOICES.setdefault((chosen.kind, chosen.name), chosen)
    add_options([method])


def _register_files() -> None:
    for info in pkgutil.iter_modules(losses.__path__):
        if info.name not in _FILES:
            register_method(importlib.import_module(f"{losses.__name__}.{info.name}").METHOD)


_register_files()


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


def head_classes() -> set[Any]:
    """Return the classes of the losses' heads. Losses may share a class."""
    return {imported(method.head) for method in METHODS.values() if method.head is not None}


def create_loss(
    name: str,
    embed_dim: int | None = None,
    num_samples: int | None = None,
    reference_dim: int | None = None,
    steps: int = 0,
    **options: Any,
) -> "ContrastiveLoss":
    """Create a loss. With ``steps``, it has the same defaults as ``openclip-ext train --loss``.

    Args:
        name: A name in :func:`list_losses`, or ``my.module:METHOD`` for your own loss.
        embed_dim: Embedding dimension. Losses with a network or prototypes need it; other losses ignore it.
        num_samples: Number of training samples. Losses with per-sample state need it; other losses ignore it.
        reference_dim: Embedding dimension of a reference model. Each call then needs the reference's embeddings as
            ``reference=(image, text)``. None (default) means no reference model. With a reference model, every loss is
            composed of parts, even ``openclip``.
        steps: Number of optimizer steps of the run. In a long run, a solved temperature starts lower. In a short run, a
            learned temperature has a larger ``lr_tau``. 0 (default) means the initial value of short runs and the ``lr_tau``
            of long runs.
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
    method = configured(name, options, steps)
    if reference_dim is None and _reference_of(method) is not None:
        given = min(REFERENCE_OPTIONS & options.keys())
        raise OptionError(given, f"{given}= needs a reference model: set reference_dim=, its embedding dimension")
    sizes = {"embed_dim": embed_dim, "num_samples": num_samples}
    loss = _build(method, sizes, reference_dim or 0)
    loss.given = frozenset(options)
    return loss


def _checked_size(name: str, value: Any, meaning: str) -> int:
    return Option(name, int, None, "", minimum=1, hint=meaning).check(value)


def check_options(name: str, **options: Any) -> "ContrastiveLoss":
    """Create a loss with small sizes, to check its options and read its attributes before the sizes are known.

    Raise OptionError for the same reasons as :func:`create_loss`.
    """
    method = configured(name, options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return _build(method, dict.fromkeys(_REQUIREMENTS, _SMALL), _SMALL * (_reference_of(method) is not None))


def options_used_by(name: str, **options: Any) -> dict[str, Any]:
    """Return all options of a loss with their defaults. Raise OptionError for the same reasons as :func:`create_loss`.

    The result depends only on the options ``normalizer``, ``temperature_scheme`` and ``views``, and on whether there is an
    option of a reference model.
    """
    return _with_parts(find_method(name), options).values()


def run_defaults(name: str, given: Mapping[str, Any], steps: int = 0, pretrained: bool = False) -> dict[str, Any]:
    """Return all options of a loss in a run: those ``given``, and the run's defaults of the rest.

    ``steps`` is the number of optimizer steps of the run. If ``pretrained``, the model already has a learned temperature.
    """
    return _with_parts(find_method(name), given, steps, pretrained).values()


def configured(name: str, options: Mapping[str, Any], steps: int = 0) -> Method:
    """Return the method of a loss with the values of its options. Raise OptionError for a wrong option."""
    options = _with_rho(options)
    method = _with_parts(find_method(name), options, steps)
    defaults = method.values()
    if unused := sorted(set(options) - set(defaults)):
        takes = ", ".join(f"{option}=" for option in sorted(defaults))
        explained = _part_that_uses(method, options, unused) or f"which takes {takes}"
        found = ", ".join(f"{option}=" for option in unused)
        raise OptionError(unused[0], f"{found}: not used by the loss {_title(method)!r}, {explained}")
    # The defaults of an own METHOD may be wrong, too.
    values = {option: OPTIONS[option].check(value) for option, value in (defaults | options).items()}
    if values.get("rho_end", 0) is None and options.get("rho_switch") not in (None, defaults["rho_switch"]):
        raise OptionError("rho_switch", "rho_switch=: no effect without rho_end=, the value of rho after the switch")
    lowest = values.get("temperature_min", 0.0)
    highest = values.get("temperature_max", OPTIONS["temperature_max"].default)
    if options.get("temperature") is not None and not lowest <= values["temperature"] <= highest:
        found = f"temperature={values['temperature']:g}"
        raise OptionError("temperature", f"{found}: expected a temperature from {lowest:g} to {highest:g}")
    return method.with_options(values)


@contextlib.contextmanager
def _wide_default_dtype() -> Iterator[None]:
    """Create tensors in at least float32, although Lightning may have set half precision as the default dtype."""
    import torch

    dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.promote_types(dtype, torch.float32))
    try:
        yield
    finally:
        torch.set_default_dtype(dtype)


@_wide_default_dtype()
def _build(method: Method, sizes: Mapping[str, int | None], reference_dim: int) -> "ContrastiveLoss":
    """Build a loss. Raise ValueError if a size that it needs is missing, and OptionError if its parts are incompatible."""
    needed: dict[str, int] = {}
    for size in sorted({size for part in method.flattened() for size in part.needs} & sizes.keys()):
        if sizes[size] is None:
            raise ValueError(f"the loss {_title(method)!r} needs {size}=, {_REQUIREMENTS[size]}")
        needed[size] = _checked_size(size, sizes[size], _REQUIREMENTS[size])
    return method.build(Sizes(**needed, reference_dim=reference_dim))


def _check_parts(method: Composed) -> None:
    """Raise OptionError if the parts of a loss are incompatible."""
    from openclip_ext.contrastive.global_loss import incompatibility

    parts = (method.normalizer, method.temperature_scheme)
    if reason := incompatibility(method.objective_class(), *(imported(part.module) for part in parts)):
        others = [name for name, other in METHODS.items() if isinstance(other, Composed) and other.objective is None]
        option = "normalizer" if _changed_parts(method)[0] else "temperature_scheme"
        message = f"{_title(method)}: {reason}. Losses that take these parts: {', '.join(others)}"
        raise OptionError(option, message)


def _with_rho(options: Mapping[str, Any]) -> dict[str, Any]:
    options = dict(options)
    if "hard_share" in options:
        if "rho" in options:
            raise OptionError("rho", "rho= and hard_share= are alternatives: set only one")
        options["rho"] = rho_of(HARD_SHARE.check(options.pop("hard_share")))
    return options


def _with_parts(method: Method, options: Mapping[str, Any], steps: int = 0, pretrained: bool = False) -> Method:
    """Return the form of a loss that the options choose, with its defaults in a run of this number of steps."""
    views = options.get("views")
    chosen = [part for part in PARTS if options.get(part)] + sorted(REFERENCE_OPTIONS & options.keys())
    if views is not None and OPTIONS["views"].check(views) == 2 and not isinstance(method, TwoViews):
        if method.two_views is None:
            others = [name for name, other in METHODS.items() if other.two_views or isinstance(other, TwoViews)]
            reason = f"{method.name} compares images with texts. Use one of {', '.join(others)}"
            raise OptionError("views", f"views={views}: {reason}")
        method = method.two_views
    elif views == 1 and isinstance(method, TwoViews):
        reason = "this loss compares two views of each image. Use openclip for images and texts"
        raise OptionError("views", f"views=1: {reason}")
    if chosen and method.composed is not None:
        method = method.composed
    if not isinstance(method, Composed):
        if chosen:
            what = "a reference model" if chosen[0] in REFERENCE_OPTIONS else f"{chosen[0]}="
            raise OptionError(
                chosen[0], f"{what}: not used by the loss {method.name!r}, whose parts are fixed. Remove it"
            )
        return method
    names = {part: OPTIONS[part].check(options.get(part)) for part in PARTS}
    if pretrained and not names["temperature_scheme"]:
        names["temperature_scheme"] = method.pretrained_scheme
    choices = CHOICES | {(part.kind, part.name): part for part in (*method.other_parts, *method.nested().values())}
    parts: dict[str, Any] = {kind: choices[kind, name] for kind, name in names.items() if name}
    method = replace(method, **parts, reference=ReferencePart() if REFERENCE_OPTIONS & options.keys() else None)
    scheme = method.temperature_scheme
    if getattr(scheme, "lr_tau", 0) is None and method.normalizer.lr_tau is not None:
        scheme = scheme.with_options({"lr_tau": method.normalizer.lr_tau})
    method = replace(method, temperature_scheme=scheme.in_run(steps))
    _check_parts(method)
    return method


def _reference_of(method: Method) -> ReferencePart | None:
    return method.reference if isinstance(method, Composed) else None


def _changed_parts(method: Composed) -> list[bool]:
    """Return whether the normalizer and the temperature scheme differ from the loss's own parts."""
    own = METHODS.get(method.name, method)
    own = own.composed or own
    return [getattr(method, part).name != getattr(getattr(own, part, None), "name", None) for part in PARTS]


def _title(method: Method) -> str:
    if not isinstance(method, Composed) or not any(_changed_parts(method)):
        return method.name
    return (
        f"{method.name} with normalizer {method.normalizer.name}, temperature scheme {method.temperature_scheme.name}"
    )


def _values_with(method: Method, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return all options of the form of a loss that the options choose, or nothing if there is no such form."""
    with contextlib.suppress(OptionError):
        return _with_parts(method, options).values()
    return {}


def _part_that_uses(method: Method, options: Mapping[str, Any], unused: list[str]) -> str:
    """Return a text with the parts with which a loss uses the ``unused`` options, or an empty text."""
    if not isinstance(method.composed or method, Composed):
        return ""
    for part in PARTS[::-1]:
        names = [name for kind, name in CHOICES if kind == part]
        usable = [name for name in names if {*unused} <= _values_with(method, {**options, part: name}).keys()]
        if usable:
            others = f" (or {', '.join(usable[1:])})" if usable[1:] else ""
            return f"only with {part}={usable[0]}{others}"
    return ""
