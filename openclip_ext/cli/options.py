"""Options of losses and flags of the command line, with type, default, meaning and range.

A configuration is a dataclass. :func:`cli_field` declares each field that a flag sets. The parser and ``--help`` are made from
these fields, and :func:`from_flags` creates a configuration from parsed flags. Fields without help have OpenCLIP's flags.
"""

import dataclasses
import difflib
import math
import operator
import re
import types
import typing
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

T = TypeVar("T")
_METADATA = "flag"


class OptionError(ValueError):
    """An error for a rejected value of ``option``. :func:`with_flags` changes ``gamma=0.5`` in it to ``--gamma 0.5``."""

    def __init__(self, option: str, message: str) -> None:
        super().__init__(message)
        self.option = option


# Words with a smaller ratio of ``difflib.SequenceMatcher`` are not suggested: --gpus does not mean --eps.
_SIMILAR = 0.75


def nearest(word: str, known: Collection[str]) -> str:
    """Return ``; did you mean ...?`` with the most similar known word, or an empty text if no known word is similar."""
    names = {name.lower(): name for name in known}
    close = difflib.get_close_matches(word.lower(), names, n=1, cutoff=_SIMILAR)
    return f"; did you mean {names[close[0]]}?" if close else ""


_ASSIGNMENT = re.compile(r"\b([a-z]\w*)=([^\s:,;)]*)")


def with_flags(message: str, options: "Mapping[str, Option]") -> str:
    """Replace options in an :class:`OptionError`'s message by flags: ``gamma=0.5`` becomes ``--gamma 0.5``.

    ``options`` contains options by name. If a name is not in ``options``, its flag is the name with hyphens.
    """

    def as_flag(assignment: re.Match[str]) -> str:
        name, value = assignment[1], assignment[2]
        if value.startswith("'"):
            value = value.strip("'")
        option = options.get(name)
        if option is not None and option.ablation:
            return f"--loss-option {name}={value}".removesuffix("=")
        flag = "--" + name.replace("_", "-") if option is None else option.flag
        if value in ("True", "False"):
            return as_words(flag, value == "True")[0]
        return f"{flag} {value}".rstrip()

    return _ASSIGNMENT.sub(as_flag, message)


@dataclass(frozen=True)
class Option:
    """An option of a loss, or a flag of the training program.

    Attributes:
        name: Keyword of ``create_loss``, or the flag's Python name.
        type: Type of the value. ``bool`` options have flags ``--name`` and ``--no-name``.
        default: Default value. A loss or its parts may have another default.
        symbol: Symbol in the papers.
        choices: Accepted values. None (default) means any value.
        flag: The flag. Empty (default) means ``--`` and the name with hyphens.
        nullable: Whether None is accepted ("none" on the command line). ``help`` explains what None means.
        openclip_flag: Whether OpenCLIP's parser has this flag.
        ablation: Whether the option has no flag of its own and is set by ``--loss-option NAME=VALUE``.
        hint: Advice in the error message for a rejected value.
        is_list: Whether the flag accepts any number of values, each of ``type``.
    """

    name: str
    type: type
    default: Any
    help: str
    symbol: str = ""
    choices: tuple[str, ...] | None = None
    minimum: float | None = None
    maximum: float | None = None
    exclusive_minimum: float | None = None
    exclusive_maximum: float | None = None
    flag: str = ""
    nullable: bool = False
    openclip_flag: bool = False
    ablation: bool = False
    hint: str = ""
    is_list: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "flag", self.flag or "--" + self.name.replace("_", "-"))

    def check(self, value: Any) -> Any:
        """Convert ``value`` to the option's type. Raise OptionError if the value is not accepted."""
        if value is None and self.nullable:
            return None
        wrong = OptionError(self.name, f"{self.name}={value!r}: expected {self._accepted()}")
        if value is None or isinstance(value, bool) is not (self.type is bool):
            raise wrong
        try:
            converted = self.type(value)
        except (TypeError, ValueError, OverflowError):
            raise wrong from None
        if self.type is int and not isinstance(value, str) and converted != value:  # also of NumPy or PyTorch
            raise wrong
        is_number = self.type in (int, float)
        if is_number and not (
            math.isfinite(converted) and all(holds(converted, at) for at, _, holds in self._bounds())
        ):
            raise wrong
        if self.choices is not None and converted not in self.choices:
            raise wrong
        return converted

    def parse(self, text: str) -> Any:
        """Convert a text from the command line to a checked value. ``none`` means None if the option is nullable."""
        if self.nullable and text.lower() == "none":
            return None
        if self.type is bool:
            return self.check({"true": True, "false": False}.get(text.lower(), text))
        return self.check(text)

    def _bounds(self) -> list[tuple[float, str, Callable[[float, float], bool]]]:
        bounds = ((getattr(self, name), text, holds) for name, (text, holds) in _BOUNDS.items())
        return [bound for bound in bounds if bound[0] is not None]

    def _accepted(self) -> str:
        if self.choices is not None:
            return f"one of {', '.join(self.choices)}"
        text = _TYPE_NAMES[self.type] + "".join(text.format(bound) for bound, text, _ in self._bounds())
        return f"{text}; {self.hint}" if self.hint else text


def as_words(flag: str, value: Any) -> list[str]:
    """Return the command-line arguments that set a flag to a value."""
    if isinstance(value, bool):
        return [flag if value else f"--no-{flag[2:]}"]
    if isinstance(value, dict):
        return [flag, *(f"{name}={setting}" for name, setting in value.items())]
    if isinstance(value, list | tuple):
        return [flag, *map(str, value)]
    # With an equals sign, argparse does not read a negative number as a flag.
    return [f"{flag}={'none' if value is None else value}"]


def option_as_words(option: Option, value: Any) -> list[str]:
    """Return the command-line arguments that set an option of a loss to a value."""
    if option.ablation:
        return [f"--loss-option={option.name}={'none' if value is None else str(value).lower()}"]
    return as_words(option.flag, value)


_BOUNDS: dict[str, tuple[str, Callable[[float, float], bool]]] = {
    "minimum": (" >= {:.10g}", operator.ge),
    "exclusive_minimum": (" > {:.10g}", operator.gt),
    "maximum": (", at most {:.10g}", operator.le),
    "exclusive_maximum": (", below {:.10g}", operator.lt),
}
_TYPE_NAMES = {int: "an integer", float: "a number", bool: "True or False", str: "a string"}


def cli_field(
    default: Any = dataclasses.MISSING,
    help: str = "",
    *,
    dest: str = "",
    needs: str = "",
    **limits: Any,
) -> Any:
    """Declare a field of a configuration that is set by a flag.

    Args:
        help: Effect of the flag. An empty text means that the flag is OpenCLIP's.
        dest: The flag's Python name, if it differs from the field's name.
        needs: Python name of the flag that this flag requires.
        limits: Other attributes of :class:`Option`: ``minimum``, ``choices``, and so on.
    """
    declared = {"help": help, "dest": dest, "needs": needs, "limits": limits}
    return dataclasses.field(default=default, metadata={_METADATA: declared})


def _flags_of(config: type) -> Iterator[tuple[dataclasses.Field, str, dict[str, Any]]]:
    """Yield the fields of a configuration that are set by flags, with the Python name and the declaration of the flag."""
    for field in dataclasses.fields(config):
        if declared := field.metadata.get(_METADATA):
            yield field, declared["dest"] or field.name, declared


def own_options(configs: Iterable[type]) -> list[Option]:
    """Return the flags of the given configurations, without the flags that OpenCLIP's parser already defines."""
    return [
        _option(config, field, name, declared)
        for config in configs
        for field, name, declared in _flags_of(config)
        if declared["help"]
    ]


def from_flags(config: type[T], flags: Mapping[str, Any], /, **others: Any) -> T:
    """Create a configuration from the values of flags (by Python name). Fields in ``others`` are set directly instead."""
    values = {}
    for field, name, _ in _flags_of(config):
        if field.name not in others:
            # argparse returns a list
            values[field.name] = tuple(flags[name]) if isinstance(field.default, tuple) else flags[name]
    return config(**values, **others)


def check_flags(config: type, flags: Mapping[str, Any]) -> None:
    """Raise OptionError if a flag of a configuration is out of range or requires a flag that is not given.

    ``flags`` contains the values of all flags by Python name. A value of None is not checked.
    """
    for field, name, declared in _flags_of(config):
        value, needs = flags[name], declared["needs"]
        if declared["limits"] and value is not None:
            option = _option(config, field, name, declared)
            for one in value if option.is_list else [value]:
                option.check(one)
        if needs and value != field.default and not flags[needs]:
            raise OptionError(name, f"{name}= needs {needs}=")


def check_config(config: Any) -> None:
    """Check a configuration that may come from Python, as :func:`check_flags` checks flags."""
    check_flags(type(config), {name: getattr(config, field.name) for field, name, _ in _flags_of(type(config))})


def _option(config: type, field: dataclasses.Field, name: str, declared: Mapping[str, Any]) -> Option:
    hint = typing.get_type_hints(config)[field.name]
    is_list = typing.get_origin(hint) is tuple
    kinds = typing.get_args(hint) if is_list or isinstance(hint, types.UnionType) else (hint,)
    kind = next(kind for kind in kinds if kind in (bool, int, float, str))
    nullable, limits = types.NoneType in kinds, declared["limits"]
    return Option(name, kind, field.default, declared["help"], nullable=nullable, is_list=is_list, **limits)
