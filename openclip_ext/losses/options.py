"""The options of this package's losses, which ``options.json`` describes.

Flags, tables in the documentation and the checks of :func:`openclip_ext.create_loss` are made from them. A part uses the
options that are keyword-only arguments of its constructor.
"""

import json
import math
from pathlib import Path
from typing import Any

from openclip_ext.cli.options import Option

_TYPES = {known.__name__: known for known in (bool, int, float, str)}


def option_from(fields: dict[str, Any]) -> Option:
    """Return the option that JSON describes by its attributes."""
    choices = tuple(fields["choices"]) if "choices" in fields else None
    return Option(**fields | {"type": _TYPES[fields["type"]], "choices": choices})


# In the order of the help: what is contrasted, the objective, temperatures, schedules, state of each sample, estimates from
# embeddings, a loss's own networks; then the options of a single method.
PACKAGE_OPTIONS = tuple(
    map(option_from, json.loads(Path(__file__).with_name("options.json").read_text(encoding="utf-8")))
)

# Sets ρ in another way.
HARD_SHARE = Option(
    "hard_share",
    float,
    None,
    "rho as the share of the data that counts as hard: sets rho to -log of it",
    symbol="exp(−ρ)",
    exclusive_minimum=0.0,
    maximum=1.0,
)


def rho_of(hard_share: float) -> float:
    """Return ρ of :data:`HARD_SHARE`."""
    return -math.log(hard_share)
