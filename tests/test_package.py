"""The package as a whole: imports stay cheap, and the rules of the architecture hold."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import openclip_ext

ROOT = Path(__file__).parents[1]
PACKAGE = Path(openclip_ext.__file__).parent
SOURCES = sorted(PACKAGE.rglob("*.py"))


def imported_modules(path: Path) -> set[str]:
    """Every module that a file imports, anywhere in it."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def loaded_by(statement: str) -> set[str]:
    """Top-level modules that a fresh interpreter has loaded after a statement."""
    program = f"{statement}\nimport sys\nprint(*sorted({{name.split('.')[0] for name in sys.modules}}))"
    shown = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    return set(shown.splitlines()[-1].split())


def test_importing_the_package_loads_nothing_heavy():
    assert not loaded_by("import openclip_ext") & {"torch", "open_clip", "webdataset", "pandas", "matplotlib", "numpy"}


def test_help_loads_nothing_heavy():
    program = "import sys; from openclip_ext.training.main import cli; sys.argv[1:] = ['--help']; cli()"
    assert not loaded_by(program) & {"torch", "open_clip", "webdataset", "pandas", "numpy"}


def test_a_loss_needs_neither_data_nor_plotting():
    loaded = loaded_by("import openclip_ext; openclip_ext.create_loss('neuclip', embed_dim=8, prototypes=4)")
    assert "torch" in loaded
    assert not loaded & {"webdataset", "pandas", "matplotlib"}


def test_the_public_names_are_there():
    assert {"create_loss", "list_losses", "register", "register_method", "with_index", "measure", "ModelLoss"} <= set(
        dir(openclip_ext)
    )
    assert {"openclip", "siglip", "fastclip", "amorlip", "neuclip"} <= set(openclip_ext.list_losses())
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = openclip_ext.no_such_name


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_only_compat_touches_the_inside_of_openclip(path):
    """OpenCLIP's top level and its loss classes are its interface; the training script and the factory are not."""
    inside = ("open_clip_train", "open_clip.factory", "open_clip.utils", "open_clip.model", "open_clip.transform")
    assert path.name == "compat.py" or not {name for name in imported_modules(path) if name.startswith(inside)}


@pytest.mark.parametrize(
    "path",
    [path for path in SOURCES if path.parent.name in ("losses", "contrastive", "state")],
    ids=lambda p: p.stem,
)
def test_losses_know_no_command_line(path):
    assert "argparse" not in imported_modules(path)


def test_the_lowest_versions_that_are_tested_are_those_in_the_docs():
    pins = dict(
        line.split("==")
        for line in (ROOT / ".github" / "lowest-versions.txt").read_text().splitlines()
        if not line.startswith("#")
    )
    documented = {}
    for line in (ROOT / "docs" / "install.md").read_text(encoding="utf-8").partition("## Versions")[2].splitlines():
        if line.startswith("| ") and "lowest" not in line:
            names, versions = line.strip("|").split("|")[:2]
            documented |= dict(zip(names.split(","), versions.split(","), strict=True))
    assert pins == {name.strip(): version.strip() for name, version in documented.items()}


def test_the_version_to_cite_is_the_packages():
    assert f"\nversion: {openclip_ext.__version__}\n" in (ROOT / "CITATION.cff").read_text()
