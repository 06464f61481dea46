"""JSON of a known shape: checked once, where a file is read, with the place of what is wrong."""

import types
from collections.abc import Callable
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints, is_typeddict

T = TypeVar("T")
Reader = Callable[[Any, str], Any]


def read_as(kind: type[T], value: Any, where: str) -> T:
    """Check a value that came from JSON, and build dataclasses from it.

    Args:
        kind: A dataclass or TypedDict of ``bool``, ``int``, ``float``, ``str``, ``list[X]``, ``dict[str, X]``, ``X | None``,
            ``Any``, and dataclasses and TypedDicts again. Entries with a default may be missing.
        value: What ``json.loads`` returned.
        where: Name of the value in messages.

    Raises:
        ValueError: A type is another one, an entry is missing or unknown.

    Example:
        >>> read_as(Shard, {"url": "0.tar", "num_samples": 7.5}, "shards[0]")
        ValueError: shards[0].num_samples is 7.5, expected int
    """
    return _reader(kind)(value, where)  # type: ignore[arg-type]


@cache
def _reader(kind: Any) -> Reader:
    """Return the function that reads a kind; made once, since a file may have a hundred thousand of them."""
    origin, arguments = get_origin(kind), get_args(kind)
    if kind is Any:
        return lambda value, where: value
    if origin in (Union, types.UnionType):
        (inner,) = (argument for argument in arguments if argument is not type(None))
        read_inner = _reader(inner)
        return lambda value, where: None if value is None else read_inner(value, where)
    if origin is list:
        read_item = _reader(arguments[0])
        return lambda value, where: [
            read_item(item, f"{where}[{number}]") for number, item in enumerate(_checked(value, list, where))
        ]
    if origin is dict:
        read_entry = _reader(arguments[1])
        return lambda value, where: {
            name: read_entry(entry, f"{where}.{name}") for name, entry in _checked(value, dict, where).items()
        }
    if is_dataclass(kind) or is_typeddict(kind):
        return _entries_reader(kind)
    return lambda value, where: _checked(value, kind, where)


def _entries_reader(kind: Any) -> Reader:
    readers = {name: _reader(hint) for name, hint in get_type_hints(kind).items()}
    if is_typeddict(kind):
        needed: frozenset[str] = kind.__required_keys__
    else:
        needed = frozenset(f.name for f in fields(kind) if f.default is MISSING and f.default_factory is MISSING)

    def read(value: Any, where: str) -> Any:
        entries = _checked(value, dict, where)
        if missing := needed - entries.keys():
            raise ValueError(f"{where} has no {', '.join(sorted(missing))}")
        if unknown := entries.keys() - readers.keys():
            raise ValueError(f"{where} has the unknown {', '.join(sorted(unknown))}")
        return kind(**{name: readers[name](entry, f"{where}.{name}") for name, entry in entries.items()})

    return read


def _checked(value: Any, kind: type, where: str) -> Any:
    if kind is float and type(value) is int:
        return value
    if type(value) is not kind:  # bool is an int for isinstance
        raise ValueError(f"{where} is {str(value)[:80]!r}, expected {kind.__name__}")
    return value
