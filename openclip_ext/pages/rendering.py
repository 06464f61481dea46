"""Render a template of ``templates/``: one self-contained HTML page, or plain text."""

import base64
import functools
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jinja2
from PIL import Image


def render_page(template: str, title: str, **values: Any) -> str:
    """Return an HTML page with a title and the ``values`` that the template shows.

    Everything except :class:`markupsafe.Markup`, the type of charts, is escaped. ``jinja2.UndefinedError`` if the template
    shows a value that was not given.

    Args:
        template: file name in ``templates/``; ``base.html`` has the style, ``macros.html`` the shared macros.
    """
    return _environment().get_template(template).render(title=title, **values)


def render_lines(template: str, **values: Any) -> list[str]:
    """Return the lines of a text that are not empty; nothing is escaped."""
    return [line for line in _environment().get_template(template).render(**values).splitlines() if line]


def markdown_table(rows: Sequence[Sequence[str]]) -> str:
    """Format a Markdown table; the first row is the head."""
    head, *body = (" | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in row) for row in rows)
    return "\n".join(f"| {row} |" for row in (head, " | ".join(["---"] * len(rows[0])), *body))


def thumbnail(image: Image.Image, pixels: int) -> str:
    """Return a small copy of an image, up to ``pixels`` wide and high, as a data URI."""
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
