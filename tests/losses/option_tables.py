"""The tables of options in ``docs/methods/``, made from the code.

A page says whose options it documents in a comment, and the table between it and the next comment is made from
``openclip_ext/losses/options.py`` and the defaults of the registry::

    <!-- options of: sogclr; neuclip normalizer=mlp -->
    <!-- end of options -->

``python -m tests.losses.option_tables`` brings all pages up to date, and the file that ``--help`` reads; ``test_docs.py`` says
where a page is not.
"""

import re
from pathlib import Path
from typing import Any

from openclip_ext.losses import table
from openclip_ext.losses.options import Option
from openclip_ext.losses.registry import OPTIONS, options_used_by

PAGES = sorted((Path(__file__).parents[2] / "docs" / "methods").glob("*.md"))
_TABLE = re.compile(r"<!-- options of: (?P<losses>.+?) -->\n.*?<!-- end of options -->", flags=re.DOTALL)


def losses_on(text: str) -> list[str]:
    """What a page's comments name: losses, with the parts and views that make them another one."""
    return [loss.strip() for found in _TABLE.finditer(text) for loss in found["losses"].split(";")]


def updated(text: str) -> str:
    """A page with its tables as the code has them."""
    return _TABLE.sub(lambda found: _table([loss.strip() for loss in found["losses"].split(";")]), text)


def _table(losses: list[str]) -> str:
    titles, columns = _columns(losses)
    header = ["option", "flag", "symbol", "meaning", *titles]
    rows = [
        [f"`{name}`", f"`{option.flag}`", option.symbol, _meaning(option), *(_cell(used, name) for used in columns)]
        for name, option in OPTIONS.items()
        if any(name in used for used in columns)
    ]
    lines = [header, ["---"] * len(header), *rows]
    table = "\n".join("| " + " | ".join(line) + " |" for line in lines)
    return f"<!-- options of: {'; '.join(losses)} -->\n{table}\n<!-- end of options -->"


def _columns(losses: list[str]) -> tuple[list[str], list[dict[str, Any]]]:
    """Titles and defaults; losses that are the same, as one with two names is, share a column."""
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


def main() -> None:
    """Rewrite the help's file, and the pages whose tables are out of date."""
    table.write()
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        if updated(text) != text:
            page.write_text(updated(text), encoding="utf-8")
            print(f"updated {page.name}")


if __name__ == "__main__":
    main()
