"""The built package: every command works outside the cloned repository."""

import os
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

from openclip_ext import __version__
from openclip_ext.data.shapes.write import ShapesConfig, write_shards

ROOT = Path(__file__).parents[1]
ADDRESS = "https://example.org/owner/name"


def sh(*command: str | Path, cwd: Path, **environment: str) -> str:
    """Run a command in the folder ``cwd``, without ``PYTHONPATH``; return its output."""
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    result = subprocess.run(command, cwd=cwd, env=clean | environment, capture_output=True, text=True)
    assert result.returncode == 0, f"{command}\n{result.stdout}{result.stderr}"
    return result.stdout + result.stderr


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Build the release and check it with twine; return the path of the wheel."""
    pytest.importorskip("build")
    pytest.importorskip("twine")
    output = tmp_path_factory.mktemp("wheel")
    script = ROOT / "scripts" / "release.py"
    shown = sh(sys.executable, script, output, "--repository", ADDRESS, "--no-isolation", cwd=output)
    assert shown.count("PASSED") == 2
    (path,) = output.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def program(wheel, tmp_path_factory):
    """Return ``openclip-ext`` of a new environment with the wheel, which can also import this environment's packages."""
    folder = tmp_path_factory.mktemp("environment")
    sh(sys.executable, "-m", "venv", "--without-pip", folder, cwd=folder)
    (packages,) = (folder / "lib").glob("python*/site-packages")
    # Python ignores .pth files in folders that a .pth file adds, so an editable install of the clone is not importable.
    own = sorted({sysconfig.get_path("purelib"), *(path for path in sys.path if path.endswith("site-packages"))})
    (packages / "others.pth").write_text("\n".join(own))
    python = folder / "bin" / "python"
    sh(sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index", wheel, cwd=folder)
    code = "import importlib.util as u; print(u.find_spec('openclip_ext.evaluation.scoring').origin)"
    assert sh(python, "-c", code, cwd=folder).startswith(str(folder / "lib"))
    return folder / "bin" / "openclip-ext"


def test_it_adds_one_name_to_the_installed_packages_and_its_readme_has_whole_addresses(wheel):
    archive = zipfile.ZipFile(wheel)
    names = archive.namelist()
    assert {name.split("/")[0] for name in names} == {"openclip_ext", f"openclip_ext-{__version__}.dist-info"}
    packaged = {name.removeprefix("openclip_ext/") for name in names}
    source = {str(path.relative_to(ROOT / "openclip_ext")) for path in (ROOT / "openclip_ext").rglob("*.py")}
    assert source <= packaged and "model_configs/demo-vit.json" in packaged and "py.typed" in packaged
    readme = archive.read(f"openclip_ext-{__version__}.dist-info/METADATA").decode()
    assert f"]({ADDRESS}/raw/HEAD/docs/images/equal-epochs.png)" in readme
    assert f"]({ADDRESS}/blob/HEAD/docs/data.md)" in readme
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
    sh(program, "report", "logs/run", "--output", "report", cwd=tmp_path)
    assert (tmp_path / "report" / "curves.png").stat().st_size > 10_000
