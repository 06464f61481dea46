"""The arrows between the rooms go one way, and each method has a file that names its page and its reference."""

import ast
import re
from pathlib import Path

import pytest

import openclip_ext

PACKAGE = Path(openclip_ext.__file__).parent
# Rooms that a room must not import.
FORBIDDEN = {
    "contrastive": {"losses", "training", "data", "diagnostics"},
    "state": {"losses", "contrastive", "training", "data", "diagnostics"},
    "losses": {"training", "data", "diagnostics", "compat"},
}
# Files in losses/ that are no method's.
NO_METHOD = {"__init__", "heads", "method", "options", "registry"}


def _files(room: str) -> list[Path]:
    return sorted((PACKAGE / room).glob("*.py"))


def _imported_rooms(path: Path) -> set[str]:
    modules = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module:
            modules |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
    return {module.split(".")[1] for module in modules if module.startswith("openclip_ext.")}


@pytest.mark.parametrize("room", FORBIDDEN)
def test_no_arrow_runs_back_up(room: str) -> None:
    found = {path.name: _imported_rooms(path) & FORBIDDEN[room] for path in _files(room)}
    assert {name: rooms for name, rooms in found.items() if rooms} == {}


def test_each_method_has_one_file() -> None:
    for path in _files("losses"):
        text = path.read_text(encoding="utf-8")
        assert ("\nMETHOD = " in text or "\nMETHODS = " in text) == (path.stem not in NO_METHOD), path.name


@pytest.mark.parametrize("path", _files("losses"), ids=lambda path: path.name)
def test_a_methods_file_names_its_page_and_its_reference(path: Path) -> None:
    if path.stem in NO_METHOD:
        return
    docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    root = PACKAGE.parent
    linked = re.findall(r"``((?:docs|tests)/[\w./-]+)``", docstring)
    assert any(link.startswith("docs/methods/") for link in linked)
    assert path.stem == "openclip" or any(link.startswith("tests/references/") for link in linked)
    assert [link for link in linked if not (root / link).is_file()] == []
    assert "create_loss(" in docstring
