"""Check the types of values that were read from a file."""

from typing import Any


def checked_dict(value: Any, where: str, kind: type = object) -> dict[str, Any]:
    """Return a dictionary whose values have the type ``kind``; otherwise raise ValueError. ``where`` names the dictionary."""
    if not isinstance(value, dict):
        raise ValueError(f"{where} is {str(value)[:80]!r}, expected dict")
    for name, entry in value.items():
        if not isinstance(entry, kind) or (kind is int and isinstance(entry, bool)):  # isinstance(True, int) is True
            raise ValueError(f"{where}.{name} is {str(entry)[:80]!r}, expected {kind.__name__}")
    return value
