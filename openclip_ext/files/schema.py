"""Check JSON against a schema when a file is read."""

import types
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints, is_typeddict

T = TypeVar("T")


def read_as(kind: type[T], value: Any, where: str) -> T:
    """Check a value from ``json.loads``, and convert it to dataclasses.

    Args:
        kind: A dataclass or TypedDict. Each entry must have one of these types: ``bool``, ``int``, ``float``, ``str``,
            ``list[X]``, ``tuple[X, Y]`` (a list in JSON), ``dict[str, X]``, ``X | None``, ``Any``, a dataclass or a
            TypedDict. Entries with a default are optional.
        where: Name of the value in error messages.

    Raises:
        ValueError: A type is wrong, or an entry is missing or unknown.

    Example:
        >>> read_as(Shard, {"url": "0.tar", "num_samples": 7.5}, "shards[0]")
        ValueError: shards[0].num_samples is 7.5, expected int
    """
    return _read(kind, value, where)


def _read(kind: Any, value: Any, where: str) -> Any:
    if kind is Any:
        return value
    if is_dataclass(kind) or is_typeddict(kind):
        return _read_entries(kind, _checked(value, dict, where), where)
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        return None if value is None else _read(arguments[0], value, where)
    if origin is list:
        items = enumerate(_checked(value, list, where))
        return [_read(arguments[0], item, f"{where}[{number}]") for number, item in items]
    if origin is tuple:
        if len(_checked(value, list, where)) != len(arguments):
            raise ValueError(f"{where} has {len(value)} items, expected {len(arguments)}")
        return [_read(argument, item, where) for argument, item in zip(arguments, value, strict=True)]
    if origin is dict:
        entries = _checked(value, dict, where).items()
        return {name: _read(arguments[1], entry, f"{where}.{name}") for name, entry in entries}
    return _checked(value, kind, where)


def _read_entries(kind: Any, entries: dict[str, Any], where: str) -> Any:
    hints, needed = _entries_of(kind)
    if missing := needed - entries.keys():
        raise ValueError(f"{where} has no {', '.join(sorted(missing))}")
    if unknown := entries.keys() - hints.keys():
        raise ValueError(f"{where} has the unknown {', '.join(sorted(unknown))}")
    return kind(**{name: _read(hints[name], entry, f"{where}.{name}") for name, entry in entries.items()})


@cache
def _entries_of(kind: Any) -> tuple[dict[str, Any], frozenset[str]]:
    """Return the types of all entries, and the names of the required entries."""
    if is_typeddict(kind):
        return get_type_hints(kind), kind.__required_keys__
    needed = (f.name for f in fields(kind) if f.default is MISSING and f.default_factory is MISSING)
    return get_type_hints(kind), frozenset(needed)


def _checked(value: Any, kind: type, where: str) -> Any:
    is_right = isinstance(value, kind) or (kind is float and isinstance(value, int))
    if not is_right or (isinstance(value, bool) and kind is not bool):  # isinstance(True, int) is True
        raise ValueError(f"{where} is {str(value)[:80]!r}, expected {kind.__name__}")
    return value
