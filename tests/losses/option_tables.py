"""Generate the option tables of ``docs/methods/`` and the package's type stub from the code.

A comment on a page lists the losses whose options the page documents. The table between this comment and the end comment is
generated from ``openclip_ext/losses/options.py`` and the registry's defaults::

    <!-- options of: sogclr; neuclip normalizer=mlp -->
    <!-- end of options -->

Options that many losses share are explained only in README.md, between ``<!-- shared options -->`` and an end comment.

``python -m tests.losses.option_tables`` updates all tables and the stub. ``test_docs.py`` fails if one of them is outdated.
"""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import openclip_ext
from openclip_ext.cli.options import Option
from openclip_ext.losses.options import HARD_SHARE, OPTIONS, PARTS
from openclip_ext.losses.registry import list_losses, options_used_by

PAGES = sorted((Path(__file__).parents[2] / "docs" / "methods").glob("*.md"))
_TABLE = re.compile(r"<!-- options of: (?P<losses>.+?) -->\n.*?<!-- end of options -->", flags=re.DOTALL)
_SHARED_TABLE = re.compile(r"<!-- shared options -->\n.*?<!-- end of options -->", flags=re.DOTALL)


def losses_on(text: str) -> list[str]:
    """Return the losses in a page's comments, such as ``neuclip normalizer=mlp`` for a loss with another part."""
    return [loss for found in _TABLE.finditer(text) for loss in found["losses"].split("; ")]


def updated(text: str) -> str:
    """Return the text of a page with all its tables updated."""
    text = _SHARED_TABLE.sub(lambda _: _shared_table(), text)
    return _TABLE.sub(lambda found: _table(found["losses"].split("; ")), text)


# Options that no table explains: flags of OpenCLIP, and options in equal-captions.md, reference-model.md or scale.md.
ELSEWHERE = ("equal_captions", "steer", "distill", "mask_margin", "reference_temperature", "epochs", "seed")
# The defaults of PARTS are in the first table of docs/methods/README.md.
# Options that are explained in the table of shared options in docs/methods/README.md, not in the tables of the losses.
SHARED = (
    *PARTS,
    "eps",
    "rho",
    "rho_end",
    "rho_switch",
    "temperature",
    "temperature_min",
    "temperature_max",
    "lr_tau",
    "temperature_queue",
    "gamma",
    "gamma_schedule",
    "gamma_decay_epochs",
)


def _table(losses: list[str]) -> str:
    titles, columns = _columns(losses)
    names = [name for name in OPTIONS if name not in ELSEWHERE + PARTS and any(name in used for used in columns)]
    shared = [name for name in names if name in SHARED]
    above: list[str] = []
    if shared and len(columns) == 1:  # One line of defaults is shorter than rows without a meaning.
        defaults = ", ".join(f"`{name}` {_cell(columns[0], name)}" for name in shared)
        above = ["", f"[Shared options](README.md#options): {defaults}.", ""]
        names = [name for name in names if name not in shared]
        shared = []
    meaning = "meaning (empty: see [shared options](README.md#options))" if shared else "meaning"
    header = ["option († by `--loss-option`)", *titles, meaning]
    rows = [
        [
            f"`{name}`" if name in shared else _name(OPTIONS[name]),
            *(_cell(used, name) for used in columns),
            "" if name in shared else _meaning(OPTIONS[name]),
        ]
        for name in names
    ]
    return _lines(f"options of: {'; '.join(losses)}", [header, ["---"] * len(header), *rows] if rows else [], above)


def _shared_table() -> str:
    rows = [[_name(OPTIONS[name]), _meaning(OPTIONS[name])] for name in SHARED]
    return _lines("shared options", [["option", "meaning"], ["---"] * 2, *rows])


def _lines(comment: str, rows: list[list[str]], above: Sequence[str] = ()) -> str:
    table = ["| " + " | ".join(cells) + " |" for cells in rows]
    return "\n".join([f"<!-- {comment} -->", *above, *table, "<!-- end of options -->"])


def _name(option: Option) -> str:
    return f"`{option.name}`{f', {option.symbol}' * bool(option.symbol)}{' †' * option.ablation}"


def _columns(losses: list[str]) -> tuple[list[str], list[dict[str, Any]]]:
    """Return the title and the defaults of each column. Losses with equal options and defaults share a column."""
    titles: list[str] = []
    columns: list[dict[str, Any]] = []
    for loss in losses:
        name, *others = loss.split()
        parts = dict(other.split("=") for other in others)
        defaults = options_used_by(name, **{part: OPTIONS[part].parse(value) for part, value in parts.items()})
        title = " ".join([f"`{name}`", *(f"`{OPTIONS[part].flag} {value}`" for part, value in parts.items())])
        if defaults in columns:
            titles[columns.index(defaults)] += f" = {title}"
        else:
            titles.append(title)
            columns.append(defaults)
    return titles, columns


def _meaning(option: Option) -> str:
    choices = "" if option.choices is None else ": " + ", ".join(f"`{choice}`" for choice in option.choices)
    return option.help + choices


def _cell(used: dict[str, Any], name: str) -> str:
    if name not in used:
        return "–"
    value = used[name]
    if isinstance(value, bool):
        return "on" if value else "off"
    return "none" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


STUB = Path(openclip_ext.__file__).with_name("__init__.pyi")


def stub() -> str:
    """Return the content of ``openclip_ext/__init__.pyi``, from which editors complete names of losses and options."""
    homes = sorted(openclip_ext._HOMES.items(), key=lambda home: (home[1], home[0]))
    imports = [f"from {module} import {name} as {name}" for name, module in homes if name != "create_loss"]
    names = [f'        "{name}",' for name in list_losses()]
    options = [f"    {option.name}: {_annotation(option)} = ...," for option in (*OPTIONS.values(), HARD_SHARE)]
    lines = [
        "# Written by python -m tests.losses.option_tables.",
        "from typing import Any, Literal",
        "",
        *imports,
        "",
        "__version__: str",
        "",
        "def create_loss(",
        "    name: Literal[",
        *names,
        "    ]",
        "    | str,",
        "    embed_dim: int | None = ...,",
        "    num_samples: int | None = ...,",
        "    reference_dim: int | None = ...,",
        "    *,",
        *options,
        "    **options: Any,",
        ") -> ContrastiveLoss: ...",
    ]
    return "\n".join(lines) + "\n"


def _annotation(option: Option) -> str:
    choices = ", ".join(f'"{choice}"' for choice in option.choices or ())
    kind = f"Literal[{choices}]" if choices else option.type.__name__
    kind += " | str" if option.name in PARTS else ""  # a part of an own METHOD has another name
    return kind + (" | None" if option.nullable else "")


def main() -> None:
    """Rewrite the stub and the pages that are outdated."""
    for path, content in (
        (STUB, stub()),
        *((page, updated(page.read_text(encoding="utf-8"))) for page in PAGES),
    ):
        if not path.exists() or path.read_text(encoding="utf-8") != content:
            path.write_text(content, encoding="utf-8")
            print(f"updated {path.name}")


if __name__ == "__main__":
    main()
