"""The package: imports are fast, and modules import only what the architecture allows."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

import openclip_ext

ROOT = Path(__file__).parents[1]
PACKAGE = Path(openclip_ext.__file__).parent
SOURCES = sorted(PACKAGE.rglob("*.py"))
# The layers of the package. A folder (or file) may import only from itself and from earlier layers.
LAYERS = (
    "files",
    "cli",
    "distributed",
    "compat",
    "checkpoint",
    "pages",
    "model_configs",
    "state",
    "contrastive",
    "losses",
    "data",
)
LAYERS += ("evaluation", "training", "diagnostics", "compare", "export", "integrations")
# Files in losses/ that define no loss.
NO_METHOD = {"__init__", "heads", "method", "options", "registry"}


def imported_modules(path: Path) -> set[str]:
    """Return all modules that a file imports, including imports within functions."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def rooms_of(path: Path) -> set[str]:
    """Return the folders of this package, and the other packages, from which a file imports."""
    return {name.removeprefix("openclip_ext.").split(".")[0] for name in imported_modules(path)}


def loaded_by(statement: str) -> set[str]:
    """Run a statement in a new interpreter; return the modules that are loaded afterwards."""
    program = f"{statement}\nimport sys\nprint(*sys.modules)"
    shown = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    return set(shown.splitlines()[-1].split())


def test_importing_the_package_loads_nothing_heavy():
    assert not loaded_by("import openclip_ext") & {"torch", "open_clip", "webdataset", "pandas", "matplotlib", "numpy"}


def test_a_loss_needs_neither_data_nor_plotting():
    loaded = loaded_by("import openclip_ext; openclip_ext.create_loss('neuclip', embed_dim=8, prototypes=4)")
    assert "torch" in loaded
    assert not loaded & {"webdataset", "matplotlib", "open_clip_train"}
    # scikit-learn 1.7, the newest for Python 3.10, loads pandas for OpenCLIP's imports.
    assert "pandas" not in loaded or sys.version_info < (3, 11)


def test_a_loop_of_ones_own_loads_no_part_of_the_training_program():
    loaded = loaded_by("import openclip_ext.integrations.model_loss, openclip_ext.integrations.micro_batches")
    assert not [name for name in loaded if name.startswith(("openclip_ext.training", "openclip_ext.evaluation"))]


def test_the_public_names_are_there_and_load():
    names = {"create_loss", "list_losses", "register", "register_method", "with_index", "measure", "ModelLoss"}
    assert all(hasattr(openclip_ext, name) for name in names | set(openclip_ext.__all__))
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = openclip_ext.no_such_name


def test_only_compat_touches_the_inside_of_openclip():
    """Other modules may use OpenCLIP's public part: its top level and its loss classes."""
    inside = ("open_clip_train", "open_clip.factory", "open_clip.utils", "open_clip.model", "open_clip.transform")
    touching = [path.name for path in SOURCES if any(name.startswith(inside) for name in imported_modules(path))]
    assert touching == ["compat.py"]


def test_few_files_lie_loose_and_each_folder_has_its_layer() -> None:
    loose = {path.name for path in PACKAGE.iterdir() if path.is_file()}
    assert loose == {"__init__.py", "__init__.pyi", "__main__.py", "compat.py", "distributed.py", "py.typed"}
    assert {path.parent.name for path in PACKAGE.glob("*/__init__.py")} | {"compat", "distributed"} == set(LAYERS)


@pytest.mark.parametrize("room", LAYERS)
def test_no_arrow_runs_back_up(room: str) -> None:
    above = set(LAYERS[LAYERS.index(room) + 1 :])
    files = [*(PACKAGE / room).rglob("*.py"), *PACKAGE.glob(f"{room}.py")]
    found = {str(path.relative_to(PACKAGE)): rooms_of(path) & above for path in files}
    assert {name: rooms for name, rooms in found.items() if rooms} == {}


@pytest.mark.parametrize("room", ["contrastive", "losses", "state"])
def test_losses_know_no_command_line(room: str) -> None:
    assert not [path for path in (PACKAGE / room).rglob("*.py") if "argparse" in imported_modules(path)]


def test_each_method_has_one_file_which_names_its_page_and_its_reference() -> None:
    for path in sorted((PACKAGE / "losses").glob("*.py")):
        text = path.read_text(encoding="utf-8")
        if path.stem not in NO_METHOD:
            docstring = ast.get_docstring(ast.parse(text)) or ""
            linked = re.findall(r"``((?:docs|tests)/[\w./-]+)``", docstring)
            assert any(link.startswith("docs/methods/") for link in linked), path.name
            assert path.stem == "openclip" or any(link.startswith("tests/references/") for link in linked), path.name
            assert [link for link in linked if not (ROOT / link).is_file()] == []
            assert "create_loss(" in docstring, path.name


def test_the_lowest_versions_that_are_tested_are_those_in_the_docs():
    pins = re.findall(r"^(\w+)==(.+)$", (ROOT / ".github" / "lowest-versions.txt").read_text(), flags=re.MULTILINE)
    versions = (ROOT / "docs" / "install.md").read_text(encoding="utf-8").partition("## Versions")[2]
    rows = re.findall(r"^\| (\w+(?:, \w+)*) \| ([^|]+) \|", versions, flags=re.MULTILINE)
    documented = [pair for row in rows for pair in zip(*(cell.split(", ") for cell in row), strict=True)]
    assert pins == documented


def test_the_version_to_cite_is_the_packages():
    assert f"\nversion: {openclip_ext.__version__}\n" in (ROOT / "CITATION.cff").read_text()
