"""The documentation site: its navigation and its links, including links to files outside docs/."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """Return the folder of a site with four faults (three links, and a page without a place), and its build's warnings."""
    clone = tmp_path_factory.mktemp("clone")
    shutil.copytree(ROOT / "docs", clone / "docs")
    for path in ROOT.iterdir():
        if path.suffix == ".md":
            shutil.copy(path, clone)
        elif path.name not in ("docs", "site"):
            (clone / path.name).symlink_to(path)
    added = {
        "docs/methods/neuclip.md": "[`jobs`](../../scripts/slurm), [start](../../README.md#quickstart)",
        "CHANGELOG.md": "[hook](scripts/docs_hook.py#L1)",
        "docs/scale.md": "[gone](gone1.md)",
        "README.md": "[gone](docs/gone2.md)",
        "docs/cluster.md": "[gone](data.md#gone3)",
        "docs/new4.md": "# A page that is not in the navigation",
    }
    for page, text in added.items():
        with (clone / page).open("a", encoding="utf-8") as file:
            file.write(f"\n{text}\n")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict"]
    environment = os.environ | {"REPOSITORY_URL": "https://example.org/us/here"}
    done = subprocess.run(command, cwd=clone, env=environment, capture_output=True, text=True)
    assert done.returncode != 0
    return clone / "site", "\n".join(line for line in done.stderr.splitlines() if not line.startswith("INFO"))


def test_links_between_pages_lead_to_pages_and_links_to_other_files_to_the_repository(site):
    def links_of(page):
        return set(re.findall(r'href="([^"]*)"', (site[0] / page).read_text(encoding="utf-8")))

    repository = "https://example.org/us/here"
    assert {f"{repository}/tree/main/scripts/slurm", "../../#quickstart"} <= links_of("methods/neuclip/index.html")
    assert f"{repository}/blob/main/scripts/docs_hook.py#L1" in links_of("changelog/index.html")
    assert {"choosing-a-loss/", "contributing/", "patches/"} <= links_of("index.html")


def test_only_broken_links_and_pages_without_a_place_stop_the_build(site):
    _, warnings = site
    for name in ("gone1.md", "docs/gone2.md", "gone3", "new4.md"):
        assert name in warnings
    assert warnings.count("WARNING -") == 4, warnings
