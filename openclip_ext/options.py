"""Command-line flags as fields of configurations.

A part's configuration declares a flag with :func:`flag`: its name, type, default, help and range are said once, beside the
part that uses it. The parser and ``--help`` are made from these fields, and :func:`from_flags` fills a configuration from
parsed flags. A field without a help text is one of OpenCLIP's flags, which OpenCLIP's own parser reads.
"""

import dataclasses
import types
import typing
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from openclip_ext.losses.options import Option, OptionError

T = TypeVar("T")
_METADATA = "flag"


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
