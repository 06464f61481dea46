"""Generate the tables in ``docs/methods/`` and the package's type stub from the code.

A page declares in a comment whose options it documents. The table between this comment and the next is generated from
``openclip_ext/losses/options.py`` and the defaults of the registry::

    <!-- options of: sogclr; neuclip normalizer=mlp -->
    <!-- end of options -->

``python -m tests.losses.option_tables`` updates all of them; ``test_docs.py`` fails for outdated ones.
"""

import re
from pathlib import Path
from typing import Any

import openclip_ext
from openclip_ext.cli.options import Option
from openclip_ext.losses.options import HARD_SHARE, OPTIONS
from openclip_ext.losses.registry import list_losses, options_used_by

PAGES = sorted((Path(__file__).parents[2] / "docs" / "methods").glob("*.md"))
_TABLE = re.compile(r"<!-- options of: (?P<losses>.+?) -->\n.*?<!-- end of options -->", flags=re.DOTALL)


def losses_on(text: str) -> list[str]:
    """Return the losses in a page's comments, with parts and views that differ from their own."""
    return [loss.strip() for found in _TABLE.finditer(text) for loss in found["losses"].split(";")]


def updated(text: str) -> str:
    """Return a page with updated tables."""
    return _TABLE.sub(lambda found: _table([loss.strip() for loss in found["losses"].split(";")]), text)


# Options of many losses that are flags of OpenCLIP's, or have a page: equal-captions.md, reference-model.md, scale.md.
ELSEWHERE = ("equal_captions", "steer", "distill", "reference_temperature", "epochs", "seed")


def _table(losses: list[str]) -> str:
    titles, columns = _columns(losses)
    header = ["option († by `--loss-option`)", "symbol", "meaning", *titles]
    rows = [
        [
            f"`{name}`{' †' * option.ablation}",
            option.symbol,
            _meaning(option),
            *(_cell(used, name) for used in columns),
        ]
        for name, option in OPTIONS.items()
        if name not in ELSEWHERE and any(name in used for used in columns)
    ]
    lines = [header, ["---"] * len(header), *rows]
    table = "\n".join("| " + " | ".join(line) + " |" for line in lines)
    return f"<!-- options of: {'; '.join(losses)} -->\n{table}\n<!-- end of options -->"


def _columns(losses: list[str]) -> tuple[list[str], list[dict[str, Any]]]:
    """Return titles and defaults; equal losses, such as one with two names, share a column."""
    titles: list[str] = []
    columns: list[dict[str, Any]] = []
    for loss in losses:
        defaults = _defaults(loss)
        if defaults in columns:
            titles[columns.index(defaults)] += f" = {_title(loss)}"
        else:
            titles.append(_title(loss))
            columns.append(defaults)
    return titles, columns


def _defaults(loss: str) -> dict[str, Any]:
    name, *others = loss.split()
    parts: dict[str, Any] = dict(other.split("=") for other in others)
    return options_used_by(name, **parts | ({"views": int(parts["views"])} if "views" in parts else {}))


def _title(loss: str) -> str:
    name, *others = loss.split()
    flags = ["--" + other.replace("=", " ").replace("_", "-") for other in others]
    return " ".join([f"`{name}`", *(f"`{flag}`" for flag in flags)])


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
    """Return the content of ``openclip_ext/__init__.pyi``, which lets editors complete losses and options."""
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
    return (f"Literal[{choices}]" if choices else option.type.__name__) + (" | None" if option.nullable else "")


def main() -> None:
    """Rewrite outdated files."""
    for path, content in (
        (STUB, stub()),
        *((page, updated(page.read_text(encoding="utf-8"))) for page in PAGES),
    ):
        if not path.exists() or path.read_text(encoding="utf-8") != content:
            path.write_text(content, encoding="utf-8")
            print(f"updated {path.name}")


if __name__ == "__main__":
    main()
