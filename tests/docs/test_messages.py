"""Every message that docs/reading-the-logs.md quotes exists in the code."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "reading-the-logs.md"
# Quoted messages of torchrun and torchvision, which are not in this package's code.
OTHERS = ("ambiguous option", "operator torchvision::nms does not exist")


def texts_of(source: str) -> list[str]:
    """Return all string literals of a module; in an f-string, each value becomes ``{}``."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.JoinedStr):
            found.append("".join(part.value if isinstance(part, ast.Constant) else "{}" for part in node.values))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.append(re.sub(r"\{[^{}]*\}", "{}", node.value))
    return found


MESSAGES = [text for path in (ROOT / "openclip_ext").rglob("*.py") for text in texts_of(path.read_text())]
QUOTES = [
    quote
    for quote in re.findall(
        r"^\| `([^`]+)`", PAGE.read_text().partition("## Messages")[2].partition("\n## ")[0], re.MULTILINE
    )
    if not quote.startswith(OTHERS)
]


@pytest.mark.parametrize("quote", QUOTES)
def test_a_quoted_message_exists(quote):
    """In a quote, ``...`` and N stand for any text. The words around them must be in one message, in this order."""
    pieces = [re.escape(piece.strip()) for piece in re.split(r"\.\.\.|\bN\b", quote) if piece.strip(" :")]
    pattern = re.compile(".*".join(pieces), re.DOTALL)
    assert any(pattern.search(text) for text in MESSAGES), quote
