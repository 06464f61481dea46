"""The documentation site: its navigation and its links, including links to files outside docs/."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def clone(tmp_path):
    """Return a copy of the repository in which a test may change pages."""
    shutil.copytree(ROOT / "docs", tmp_path / "docs")
    for path in ROOT.iterdir():
        if path.suffix == ".md":
            shutil.copy(path, tmp_path)
        elif path.name not in ("docs", "site"):
            (tmp_path / path.name).symlink_to(path)
    return tmp_path


def build(clone, **environment):
    command = [sys.executable, "-m", "mkdocs", "build", "--strict"]
    return subprocess.run(command, cwd=clone, env={**os.environ, **environment}, capture_output=True, text=True)


def links_of(clone, page):
    return set(re.findall(r'href="([^"]*)"', (clone / "site" / page).read_text(encoding="utf-8")))


def test_links_between_pages_lead_to_pages_and_links_to_other_files_to_the_repository(clone):
    with (clone / "docs" / "methods" / "neuclip.md").open("a", encoding="utf-8") as page:
        page.write("\n[`jobs`](../../scripts/slurm), [start](../../README.md#quickstart)\n")
    changes = clone / "CHANGELOG.md"
    changes.write_text(changes.read_text(encoding="utf-8") + "\n[hook](scripts/docs_hook.py#L1)\n")
    done = build(clone, REPOSITORY_URL="https://example.org/us/here")
    assert done.returncode == 0, done.stderr
    assert {"https://example.org/us/here/tree/main/scripts/slurm", "../../#quickstart"} <= links_of(
        clone, "methods/neuclip/index.html"
    )
    assert "https://example.org/us/here/blob/main/scripts/docs_hook.py#L1" in links_of(clone, "changelog/index.html")
    assert {"choosing-a-loss/", "contributing/", "patches/"} <= links_of(clone, "index.html")


def test_broken_links_and_pages_without_a_place_stop_the_build(clone):
    broken = {
        "docs/scale.md": "[gone](gone1.md)",
        "README.md": "[gone](docs/gone2.md)",
        "docs/cluster.md": "[gone](data.md#gone3)",
        "docs/new4.md": "# A page that is not in the navigation",
    }
    for page, text in broken.items():
        with (clone / page).open("a", encoding="utf-8") as file:
            file.write(f"\n{text}\n")
    done = build(clone)
    assert done.returncode != 0
    warnings = "\n".join(line for line in done.stderr.splitlines() if not line.startswith("INFO"))
    for name in ("gone1.md", "docs/gone2.md", "gone3", "new4.md"):
        assert name in warnings, done.stderr
