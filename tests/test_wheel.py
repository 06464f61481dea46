"""What `pip install` of the built package gives: every command works, far from the clone."""

import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

from openclip_ext import cli
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
def wheel(tmp_path_factory):
    """Built from a copy, since a build leaves files in the source."""
    source, output = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in SOURCES:
        if (ROOT / name).is_dir():
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=ignored)
        else:
            shutil.copy(ROOT / name, source / name)
    options = ("--no-deps", "--no-build-isolation", "--no-index", "-w", output)
    sh(sys.executable, "-m", "pip", "wheel", source, *options, cwd=output, REPOSITORY_URL=ADDRESS)
    (path,) = output.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def program(wheel, tmp_path_factory):
    """``openclip-ext`` in an environment of its own, which sees the packages of this one."""
    environment = tmp_path_factory.mktemp("environment")
    sh(sys.executable, "-m", "venv", "--without-pip", environment, cwd=environment)
    python = environment / "bin" / "python"
    (packages,) = (environment / "lib").glob("python*/site-packages")
    # A path in a .pth file does not run the .pth files there: the clone, installed in place, stays unknown.
    own = sorted({sysconfig.get_path("purelib"), *(path for path in sys.path if path.endswith("site-packages"))})
    (packages / "others.pth").write_text("\n".join(own))
    options = ("install", "--no-deps", "--no-index", wheel)
    sh(sys.executable, "-m", "pip", "--python", python, *options, cwd=environment)
    found = sh(python, "-c", "import openclip_ext.eval.suite as s; print(s.__file__)", cwd=environment)
    assert found.startswith(str(packages))
    return environment / "bin" / "openclip-ext"


def test_it_adds_one_name_to_the_installed_packages(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0] for name in names} == {"openclip_ext", f"openclip_ext-{__version__}.dist-info"}
    packaged = {name.removeprefix("openclip_ext/") for name in names}
    source = {str(path.relative_to(ROOT)) for path in (ROOT / "eval").rglob("*.py")}
    assert source <= packaged and "model_configs/demo-vit.json" in packaged and "py.typed" in packaged


def test_the_readme_has_whole_addresses_on_a_package_index(wheel):
    name = f"openclip_ext-{__version__}.dist-info/METADATA"
    readme = zipfile.ZipFile(wheel).read(name).decode()
    assert f"]({ADDRESS}/raw/HEAD/docs/images/demo-set.png)" in readme
    assert f"]({ADDRESS}/blob/HEAD/docs/data.md#the-manifest)" in readme
    assert "](docs/" not in readme and f"Project-URL: Source, {ADDRESS}" in readme


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_every_command_answers(program, command, tmp_path):
    assert "usage: " in sh(program, command, "--help", cwd=tmp_path)


def test_a_run_from_data_to_export(program, tmp_path):
    write_shards(tmp_path / "data", ShapesConfig(48, samples_per_shard=12), workers=1, progress=False)
    shards = "data/{00000..00003}.tar"
    assert "48" in sh(program, "manifest", shards, cwd=tmp_path)
    flags = ["--loss", "fastclip", "--model", "demo-vit", "--precision", "fp32", "--device", "cpu", "--workers", "0"]
    flags += ["--batch-size", "16", "--epochs", "1", "--lr", "1e-3", "--logs", "logs", "--name", "run"]
    sh(program, "train", "--train-data", shards, *flags, "--log-every-n-steps", "1", cwd=tmp_path)
    checkpoint = "logs/run/checkpoints/epoch_1.pt"
    sh(program, "export", checkpoint, "--to", "safetensors", "--output", "exported", cwd=tmp_path)
    assert {"README.md", "open_clip_config.json"} <= {path.name for path in (tmp_path / "exported").iterdir()}
    sh(program, "plot", "logs/run", "--output", "curves.png", cwd=tmp_path)
    assert (tmp_path / "curves.png").stat().st_size > 10_000
