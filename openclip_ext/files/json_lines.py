"""JSON without NaN, and logs of JSON lines. If a process was killed, the last line of a log may be incomplete."""

import contextlib
import json
import logging
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from openclip_ext.files.writing import write_text

logger = logging.getLogger(__name__)


def dumps(content: Any, **options: Any) -> str:
    """Convert content to JSON. Numbers that are not finite become ``null``."""
    return json.dumps(_finite(content), allow_nan=False, **options)


def _finite(content: Any) -> Any:
    if isinstance(content, dict):
        return {key: _finite(value) for key, value in content.items()}
    if isinstance(content, list | tuple):
        return [_finite(value) for value in content]
    return None if isinstance(content, float) and not math.isfinite(content) else content


def read(path: Path) -> list[dict[str, Any]]:
    """Return the content of a log's lines, without broken lines. A missing file has no lines."""
    return [content for _, content in _lines(path) if content is not None]


def _lines(path: Path) -> Iterator[tuple[str, dict[str, Any] | None]]:
    """Yield each line with its content. The content is None if the line is not JSON of a dictionary."""
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines() if path.is_file() else []:
        content = None
        with contextlib.suppress(ValueError, RecursionError):
            content = json.loads(line)
        yield line, content if isinstance(content, dict) else None


def truncate(path: Path, keep: Callable[[dict[str, Any]], bool]) -> None:
    """Remove from a log the lines for which ``keep`` returns False. Broken lines are also removed, with a warning."""
    if not path.is_file():
        return
    kept, broken, others = [], 0, 0
    for line, content in _lines(path):
        if content is None:
            broken += 1
        elif keep(content):
            kept.append(line + "\n")
        else:
            others += 1
    if not broken and not others:
        return
    if broken:
        logger.warning(f"{path}: removed {broken} broken line(s), written by an interrupted run.")
    write_text(path, "".join(kept))
