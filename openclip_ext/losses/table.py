"""The options of all losses as a table, which ``--help`` reads from a file: the losses themselves need torch.

``python -m tests.losses.option_tables`` writes the file anew; a test says when it is out of date. Nothing but the help reads
it: a training takes its options from the registry.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from openclip_ext.losses.options import Option

FILE = Path(__file__).with_name("options.json")
_TYPES = {known.__name__: known for known in (bool, int, float, str)}


@dataclass(frozen=True)
class LossTable:
    """What the command line knows of the losses.

    Attributes:
        options: all options, in the order of the help.
        defaults: for each loss the options that it uses, with the defaults that they have there.
    """

    options: tuple[Option, ...]
    defaults: dict[str, dict[str, Any]]


def from_registry() -> LossTable:
    """The table as the code has it; imports torch."""
    from openclip_ext.losses import registry

    losses = registry.list_losses()
    return LossTable(tuple(registry.OPTIONS.values()), {loss: registry.options_used_by(loss) for loss in losses})


def with_method(name: str) -> tuple[LossTable, str]:
    """Return the table with the loss ``my.module:METHOD``, and the loss's name there; imports torch."""
    from openclip_ext.losses import registry

    method = registry.find_method(name)
    return from_registry(), method.name


def from_file() -> LossTable:
    """The table as it was last written."""
    content = json.loads(FILE.read_text(encoding="utf-8"))
    return LossTable(tuple(_option(fields) for fields in content["options"]), content["defaults"])


def _option(fields: dict[str, Any]) -> Option:
    choices = tuple(fields["choices"]) if "choices" in fields else None
    return Option(**fields | {"type": _TYPES[fields["type"]], "choices": choices})
