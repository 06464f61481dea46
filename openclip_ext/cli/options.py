"""Settings with a name, a type, a default, a meaning and a range: options of losses, and flags of the command line.

A part's configuration declares a flag with :func:`flag`: what there is to say of it is said once, beside the part that
uses it. The parser and ``--help`` are made from these fields, and :func:`from_flags` fills a configuration from parsed
flags. A field without a help text is one of OpenCLIP's flags, which OpenCLIP's own parser reads.
"""

import dataclasses
import difflib
import math
import operator
import re
import types
import typing
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

T = TypeVar("T")
_METADATA = "flag"


class OptionError(ValueError):
    """An option that is not taken, or not with this value.

    The message writes options as Python does (``gamma=0.5``); :func:`with_flags` writes them as a command line does.

    Attributes:
        option: name of the (first) option that is wrong.
    """

    def __init__(self, option: str, message: str) -> None:
        super().__init__(message)
        self.option = option


def nearest(word: str, known: Collection[str]) -> str:
    """Return ``; did you mean ...?`` with the known word that is most like this one, or nothing."""
    names = {name.lower(): name for name in known}
    close = difflib.get_close_matches(word.lower(), names, n=1)
    return f"; did you mean {names[close[0]]}?" if close else ""


_ASSIGNMENT = re.compile(r"\b([a-z]\w*)=([^\s:,;)]*)")


def with_flags(message: str, options: "Mapping[str, Option]") -> str:
    """Return a message as a command line writes it: with ``--gamma 0.5`` for ``gamma=0.5``.

    Args:
        message: of an :class:`OptionError`.
        options: options whose flags are not their names with hyphens, by name.
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
    """One setting: an option of a loss, or a flag of the training program.

    Attributes:
        name: the keyword of ``create_loss``, or the flag's Python name.
        type: what a value is parsed as (``bool`` options become ``--name`` / ``--no-name``).
        default: the value unless the loss or its parts have a default of their own.
        help: its effect, for ``--help`` and the documentation.
        symbol: the papers' symbol.
        choices: the accepted values, or None for any.
        minimum, maximum: the accepted range, both ends included.
        exclusive_minimum, exclusive_maximum: an open lower or upper end.
        flag: the command-line flag, unless it is the name with hyphens.
        nullable: None ("none" on the command line) is a value; ``help`` says what it means.
        openclip_flag: OpenCLIP's command line has this flag already.
        ablation: only ablations set it, by ``--loss-option NAME=VALUE``; it has no flag.
        hint: what to do instead of giving a value that is refused.
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

    def __post_init__(self) -> None:
        object.__setattr__(self, "flag", self.flag or "--" + self.name.replace("_", "-"))

    def check(self, value: Any) -> Any:
        """Return ``value`` as the option's type.

        Raises:
            OptionError: it is not a value of this option; the message says what was found and what is accepted.
        """
        if value is None:
            if self.nullable:
                return None
            raise OptionError(self.name, f"{self.name}=None: expected {self.accepted()}")
        converted = self._convert(value)
        if self.choices is not None and converted not in self.choices:
            raise OptionError(self.name, f"{self.name}={value!r}: expected one of {', '.join(self.choices)}")
        if self._out_of_range(converted):
            raise OptionError(self.name, f"{self.name}={value!r}: expected {self.accepted()}")
        return converted

    def parse(self, text: str) -> Any:
        """Convert a command line's text; ``none`` is None for a nullable option.

        Raises:
            OptionError: as :meth:`check`.
        """
        if self.nullable and text.lower() == "none":
            return None
        if self.type is bool:
            return self.check({"true": True, "false": False}.get(text.lower(), text))
        return self.check(text)

    def _convert(self, value: Any) -> Any:
        wrong = OptionError(self.name, f"{self.name}={value!r}: expected {self.accepted()}")
        if isinstance(value, bool) is not (self.type is bool):
            raise wrong
        if self.type is int and isinstance(value, float) and not value.is_integer():
            raise wrong
        try:
            return self.type(value)
        except (TypeError, ValueError):
            raise wrong from None

    def _bounds(self) -> list[tuple[float, str, Callable[[float, float], bool]]]:
        """Return each bound with its text, and what holds for a value inside of it."""
        bounds = ((getattr(self, name), text, holds) for name, (text, holds) in _BOUNDS.items())
        return [bound for bound in bounds if bound[0] is not None]

    def _out_of_range(self, value: Any) -> bool:
        if self.type not in (int, float):
            return False
        return not (math.isfinite(value) and all(holds(value, bound) for bound, _, holds in self._bounds()))

    def accepted(self) -> str:
        """Return the accepted values in words."""
        text = _TYPE_NAMES[self.type] + "".join(text.format(bound) for bound, text, _ in self._bounds())
        return f"{text}; {self.hint}" if self.hint else text


def as_words(flag: str, value: Any) -> list[str]:
    """Return a flag with its value as words of a command line."""
    if isinstance(value, bool):
        return [flag if value else f"--no-{flag[2:]}"]
    if isinstance(value, dict):
        return [flag, *(f"{name}={setting}" for name, setting in value.items())]
    if isinstance(value, list):
        return [flag, *map(str, value)]
    # An equals sign, since argparse would take a negative number in a word of its own for a flag.
    return [f"{flag}={'none' if value is None else value}"]


def option_as_words(option: Option, value: Any) -> list[str]:
    """Return a loss's option with its value as words of a command line."""
    if option.ablation:
        return [f"--loss-option={option.name}={'none' if value is None else str(value).lower()}"]
    return as_words(option.flag, value)


_BOUNDS: dict[str, tuple[str, Callable[[float, float], bool]]] = {
    "minimum": (" >= {:g}", operator.ge),
    "exclusive_minimum": (" > {:g}", operator.gt),
    "maximum": (", at most {:g}", operator.le),
    "exclusive_maximum": (", below {:g}", operator.lt),
}
_TYPE_NAMES = {int: "an integer", float: "a number", bool: "True or False", str: "a string"}


# --- fields of configurations -----------------------------------------------------------------------------------------


def flag(
    default: Any = dataclasses.MISSING,
    help: str = "",
    *,
    dest: str = "",
    needs: str = "",
    **limits: Any,
) -> Any:
    """Declare a field of a configuration that a flag of the command line sets.

    Args:
        default: the field's default; without one the field is required.
        help: what the flag does, if it is ours.
        dest: the flag's Python name where it is not the field's.
        needs: Python name of another flag, without which this one has no effect.
        limits: the accepted values, as :class:`Option` takes them: ``minimum``, ``choices``, and so on.
    """
    said = {"help": help, "dest": dest, "needs": needs, "limits": limits}
    return dataclasses.field(default=default, metadata={_METADATA: said})


def flag_fields(config: type) -> list[dataclasses.Field]:
    """Return the fields of a configuration that flags set."""
    return [field for field in dataclasses.fields(config) if _METADATA in field.metadata]


def python_name(field: dataclasses.Field) -> str:
    """Return the Python name of a field's flag, its attribute of the parser's namespace."""
    return field.metadata[_METADATA]["dest"] or field.name


def own_options(configs: Iterable[type]) -> list[Option]:
    """Return the flags of configurations that OpenCLIP does not have."""
    return [
        _option(config, field)
        for config in configs
        for field in flag_fields(config)
        if field.metadata[_METADATA]["help"]
    ]


def from_flags(config: type[T], flags: Mapping[str, Any], /, **others: Any) -> T:
    """Fill a configuration from flags.

    Args:
        config: the configuration's class.
        flags: all flags by their Python names.
        others: fields that are no flags, or whose values are not those of their flags.
    """
    fields = (field for field in flag_fields(config) if field.name not in others)
    return config(**{field.name: flags[python_name(field)] for field in fields}, **others)


def check_flags(config: type, flags: Mapping[str, Any]) -> None:
    """Raise OptionError for a flag that is out of its range, or has no effect without another one.

    Args:
        config: the configuration's class.
        flags: all flags by their Python names; None is not checked.
    """
    for field in flag_fields(config):
        said, name = field.metadata[_METADATA], python_name(field)
        value = flags[name]
        if said["limits"] and value is not None:
            _option(config, field).check(value)
        if said["needs"] and value != field.default and not flags[said["needs"]]:
            raise OptionError(name, f"{name}= needs {said['needs']}=")


def _option(config: type, field: dataclasses.Field) -> Option:
    said = field.metadata[_METADATA]
    hint = typing.get_type_hints(config)[field.name]
    kinds = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    kind = next(kind for kind in kinds if kind in (bool, int, float, str))
    nullable = types.NoneType in kinds
    return Option(python_name(field), kind, field.default, said["help"], nullable=nullable, **said["limits"])
