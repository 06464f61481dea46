"""Render a template in ``templates/`` to a self-contained HTML page or to plain text."""

import base64
import functools
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jinja2
from PIL import Image


def render_page(template: str, title: str, **values: Any) -> str:
    """Return an HTML page with a title, from a template and the ``values`` that the template uses.

    All values are escaped, except those of type :class:`markupsafe.Markup`, such as charts. Raise ``jinja2.UndefinedError`` if
    the template uses a value that is not given.

    Args:
        template: File name in ``templates/``, where ``base.html`` contains the style and ``macros.html`` the common macros.
    """
    return _environment().get_template(template).render(title=title, **values)


def render_lines(template: str, **values: Any) -> list[str]:
    """Render a template to plain text, and return the non-empty lines. Values are not escaped."""
    return [line for line in _environment().get_template(template).render(**values).splitlines() if line]


def markdown_table(rows: Sequence[Sequence[str]]) -> str:
    """Format a Markdown table. The first row is the header."""
    head, *body = (" | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in row) for row in rows)
    return "\n".join(f"| {row} |" for row in (head, " | ".join(["---"] * len(rows[0])), *body))


def with_minus(number: str) -> str:
    """Replace the hyphens of a formatted number with minus signs, as in all numbers of a page."""
    return number.replace("-", "−")


def thumbnail(image: Image.Image, pixels: int) -> str:
    """Return a small copy of an image as a data URI. Its width and height are at most ``pixels``."""
    small, buffer = image.convert("RGB"), io.BytesIO()
    small.thumbnail((pixels, pixels))
    small.save(buffer, "JPEG", quality=80)
    return "data:image/jpeg;base64," + base64.b64encode(buffer.getvalue()).decode()


@functools.lru_cache(maxsize=1)
def _environment() -> jinja2.Environment:
    loader = jinja2.FileSystemLoader(Path(__file__).parent / "templates")
    return jinja2.Environment(
        loader=loader,
        autoescape=lambda name: name is not None and name.endswith(".html"),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
