"""The environment script creates the environment once, and updates it when requirements or extras change."""

import itertools
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
SCRIPTS = ROOT / "scripts"


@pytest.fixture
def clone(tmp_path):
    """Return a folder with the environment script, and a fake interpreter that records calls of pip."""
    (tmp_path / "scripts").mkdir()
    shutil.copy(SCRIPTS / "_environment.sh", tmp_path / "scripts")
    (tmp_path / "scripts" / "use.sh").write_text(
        'set -euo pipefail\nextras="$1"\nsource "$(dirname -- "$0")/_environment.sh"\necho "ready in $PWD"\n'
    )
    (tmp_path / "requirements.txt").write_text("torch\n")
    (tmp_path / "requirements.lock").write_text("torch==2.14.1\n")
    (tmp_path / "pyproject.toml").write_text("")
    stub = tmp_path / "python-stub"
    stub.write_text(
        f"""#!/bin/sh
case "$*" in
  "-m venv --clear .venv") mkdir -p .venv/bin && cp "$0" .venv/bin/python ;;
  "-m pip install"*) echo "$*" >>"{tmp_path}/installs"; exit "${{PIP_STATUS:-0}}" ;;
  "-m pip --version") ;;
  *) exec "{sys.executable}" "$@" ;;
esac
"""
    )
    stub.chmod(0o755)
    return tmp_path


def use(clone, extras="plot", **environment):
    command = ["bash", str(clone / "scripts" / "use.sh"), extras]
    settings = {**os.environ, "PYTHON": str(clone / "python-stub"), "UNLOCKED": "", "EXTRAS": "", **environment}
    return subprocess.run(command, env=settings, cwd="/", capture_output=True, text=True)


def installs(clone):
    return [line.split("--constraint ")[1] for line in (clone / "installs").read_text().splitlines()]


def test_the_environment_is_made_once_and_again_when_more_is_needed(clone):
    first = use(clone, "")
    assert first.returncode == 0 and f"ready in {clone}" in first.stdout, first.stderr
    assert use(clone, "").returncode == 0
    assert installs(clone) == ["requirements.lock -e ."]
    (clone / "requirements.txt").write_text("torch>=2.6\n")
    assert use(clone, "test,plot", EXTRAS="eval").returncode == 0
    # A script must not remove extras that another script installed.
    assert use(clone, "plot").returncode == use(clone, "eval,test").returncode == 0
    assert use(clone, "plot", UNLOCKED="1").returncode == 0
    (clone / "requirements.lock").write_text("torch==2.15.0\n")
    assert use(clone, "plot").returncode == 0
    assert installs(clone)[1:] == [
        f"{lock} -e .[eval,plot,test]" for lock in ("requirements.lock", "/dev/null", "requirements.lock")
    ]


def test_the_lock_pins_what_this_package_needs():
    """For every Python from 3.10 on, the lock file has exactly one version of each requirement, within its range."""
    tomllib = pytest.importorskip("tomllib", reason="Python 3.10 cannot read TOML")
    pinned = [Requirement(line) for line in (ROOT / "requirements.lock").read_text().splitlines() if line[0] != "#"]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [line.partition("#")[0].strip() for line in (ROOT / "requirements.txt").read_text().splitlines()]
    wanted = [line for line in wanted if line] + list(itertools.chain(*project["optional-dependencies"].values()))
    for version, requirement in itertools.product(("3.10", "3.11", "3.12", "3.13"), map(Requirement, wanted)):
        here = {"python_version": version, "python_full_version": f"{version}.0"}
        if requirement.marker is None or requirement.marker.evaluate(here):
            name = canonicalize_name(requirement.name)
            found = [
                pin
                for pin in pinned
                if canonicalize_name(pin.name) == name and (pin.marker is None or pin.marker.evaluate(here))
            ]
            assert len(found) == 1, (version, requirement, found)
            (pin,) = found[0].specifier
            assert requirement.specifier.contains(pin.version), (version, requirement, found)


def test_a_failed_installation_stops_the_script_and_is_tried_again(clone):
    assert "no-such-python cannot make virtual environments" in use(clone, PYTHON="no-such-python").stderr
    failed = use(clone, PIP_STATUS="1")
    assert failed.returncode != 0 and "installation failed" in failed.stderr and "ready" not in failed.stdout
    assert "ready" in use(clone).stdout
    assert len(installs(clone)) == 2


def test_shell_scripts_parse():
    for script in (*SCRIPTS.rglob("*.sh"), ROOT / ".ci" / "run"):
        subprocess.run(["bash", "-n", script], check=True)
