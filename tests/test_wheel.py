"""The built package: every command works, far from the clone; and the evaluation has one identity, built or not."""

import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

from openclip_ext.data.shapes.write import ShapesConfig, write_shards
from openclip_ext.version import __version__

ROOT = Path(__file__).parents[1]
SOURCES = ("pyproject.toml", "setup.py", "requirements.txt", "README.md", "LICENSE", "openclip_ext", "eval")
ADDRESS = "https://example.org/owner/name"


def sh(*command: str | Path, cwd: Path, **environment: str) -> str:
    """Run a command away from the clone; what it printed."""
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    result = subprocess.run(command, cwd=cwd, env=clean | environment, capture_output=True, text=True)
    assert result.returncode == 0, f"{command}\n{result.stdout}{result.stderr}"
    return result.stdout + result.stderr


@pytest.fixture(scope="module")
def clone(tmp_path_factory):
    """A copy of the sources, since a build leaves files there."""
    source = tmp_path_factory.mktemp("source")
    for name in SOURCES:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, source / name)
    return source


@pytest.fixture(scope="module")
def wheel(clone, tmp_path_factory):
    output = tmp_path_factory.mktemp("wheel")
    options = ("--no-deps", "--no-build-isolation", "--no-index", "-w", output)
    sh(sys.executable, "-m", "pip", "wheel", clone, *options, cwd=output, REPOSITORY_URL=ADDRESS)
    (path,) = output.glob("*.whl")
    return path


def environment_with(package: Path, folder: Path, *options: str) -> Path:
    """Install a package into an environment of its own, which sees the packages of this one, and return its ``bin``."""
    sh(sys.executable, "-m", "venv", "--without-pip", folder, cwd=folder)
    (packages,) = (folder / "lib").glob("python*/site-packages")
    # A path in a .pth file does not run the .pth files there: the clone, installed in place, stays unknown.
    own = sorted({sysconfig.get_path("purelib"), *(path for path in sys.path if path.endswith("site-packages"))})
    (packages / "others.pth").write_text("\n".join(own))
    pip = (sys.executable, "-m", "pip", "--python", folder / "bin" / "python", "install")
    sh(*pip, "--no-deps", "--no-index", "--no-build-isolation", *options, package, cwd=folder)
    return folder / "bin"


@pytest.fixture(scope="module")
def program(wheel, tmp_path_factory):
    """``openclip-ext`` in an environment with the wheel."""
    environment = tmp_path_factory.mktemp("environment")
    program = environment_with(wheel, environment) / "openclip-ext"
    code = "import importlib.util as u; print(u.find_spec('openclip_ext.eval.suite').origin)"
    assert sh(program.with_name("python"), "-c", code, cwd=environment).startswith(str(environment / "lib"))
    return program


ONE_IDENTITY = """
import importlib, multiprocessing, sys
first, second = (importlib.import_module(f"{package}.tasks") for package in sys.argv[1:])
assert first is second and first.__spec__.name == first.__name__ == "openclip_ext.eval.tasks", first
assert importlib.import_module(sys.argv[1]) is importlib.import_module(sys.argv[2])
with multiprocessing.get_context("spawn").Pool(1) as pool:  # pickled there and back
    (task,) = pool.apply(first.select_tasks, (["cifar10"],))
assert task == second.TASKS["cifar10"]
"""
NAMES = ("eval", "openclip_ext.eval")


def test_a_clone_has_the_evaluation_under_two_names_and_once(clone):
    assert not any(path.is_symlink() for path in clone.rglob("*"))
    for names in (NAMES, NAMES[::-1]):
        sh(sys.executable, "-c", ONE_IDENTITY, *names, cwd=clone)
        assert sh(sys.executable, "-W", "error", "-m", f"{names[0]}.tasks", cwd=clone) == ""
    assert "usage: " in sh(sys.executable, "-m", "eval.download", "--help", cwd=clone)


def test_a_clone_installed_in_place_has_it_once(clone, tmp_path):
    python = environment_with(clone, tmp_path, "--editable") / "python"
    sh(python, "-c", ONE_IDENTITY, *NAMES, cwd=clone)
    sh(python, "-c", ONE_IDENTITY, "openclip_ext.eval", "openclip_ext.eval", cwd=tmp_path)
    shown = sh(python, "-c", "import importlib.util as u; print(u.find_spec('eval'))", cwd=tmp_path)
    assert shown == "None\n", "nobody wants a package of this name everywhere"


def test_it_adds_one_name_to_the_installed_packages_and_its_readme_has_whole_addresses(wheel):
    archive = zipfile.ZipFile(wheel)
    names = archive.namelist()
    assert {name.split("/")[0] for name in names} == {"openclip_ext", f"openclip_ext-{__version__}.dist-info"}
    packaged = {name.removeprefix("openclip_ext/") for name in names}
    source = {str(path.relative_to(ROOT)) for path in (ROOT / "eval").rglob("*.py")}
    assert source <= packaged and "model_configs/demo-vit.json" in packaged and "py.typed" in packaged
    readme = archive.read(f"openclip_ext-{__version__}.dist-info/METADATA").decode()
    assert f"]({ADDRESS}/raw/HEAD/docs/images/demo-set.png)" in readme
    assert f"]({ADDRESS}/blob/HEAD/docs/data.md#the-manifest)" in readme
    assert "](docs/" not in readme and f"Project-URL: Source, {ADDRESS}" in readme


def test_a_run_from_data_to_export(program, tmp_path):
    write_shards(tmp_path / "data", ShapesConfig(48, samples_per_shard=12), workers=1)
    shards = "data/{00000..00003}.tar"
    assert all("usage: " in sh(program, command, "--help", cwd=tmp_path) for command in ("train", "evaluate"))
    assert "48" in sh(program, "manifest", shards, cwd=tmp_path)
    flags = ["--loss", "fastclip", "--model", "demo-vit", "--precision", "fp32", "--device", "cpu", "--workers", "0"]
    flags += ["--batch-size", "16", "--epochs", "1", "--lr", "1e-3", "--logs", "logs", "--name", "run"]
    sh(program, "train", "--train-data", shards, *flags, "--log-every-n-steps", "1", cwd=tmp_path)
    checkpoint = "logs/run/checkpoints/epoch_1.pt"
    sh(program, "export", checkpoint, "--to", "safetensors", "--output", "exported", cwd=tmp_path)
    assert {"README.md", "open_clip_config.json"} <= {path.name for path in (tmp_path / "exported").iterdir()}
    sh(program, "plot", "logs/run", "--output", "curves.png", cwd=tmp_path)
    assert (tmp_path / "curves.png").stat().st_size > 10_000
