"""``docs/methods.md`` says what the table of options says."""

from pathlib import Path
from typing import Any

import pytest

from openclip_ext.losses.options import OPTIONS, Option
from openclip_ext.losses.registry import list_losses, options_used_by

PARTS = ("normalizer", "temperature_scheme")
METHODS = Path(__file__).parents[2] / "docs" / "methods.md"


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return "none" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


def row(option: Option) -> str:
    """The option's line in the documentation; its default, or those of the losses that use it if they differ."""
    losses: dict[str, list[str]] = {}
    for name in list_losses():
        used = options_used_by(name)
        if option.name in used:
            losses.setdefault(_text(used[option.name]), []).append(f"`{name}`")
    defaults = [f"{value} ({', '.join(names)})" for value, names in losses.items()]
    default = next(iter(losses)) if len(losses) == 1 else "; ".join(defaults)
    return f"| `{option.name}` | `{option.flag}` | {option.symbol} | {option.help} | {default} |"


# Those two are the table of the losses.
@pytest.mark.parametrize("option", [option for name, option in OPTIONS.items() if name not in PARTS])
def test_option_is_documented(option: Option) -> None:
    assert row(option) in METHODS.read_text(encoding="utf-8").splitlines()


def test_every_loss_is_documented() -> None:
    text = METHODS.read_text(encoding="utf-8")
    assert all(f"`{name}`" in text for name in list_losses())
