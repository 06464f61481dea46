"""The documentation site: its navigation and its links, including links to files outside docs/."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_links_lead_to_pages_or_to_the_repository_and_only_faults_stop_the_build(tmp_path):
    """A copy of the pages has four faults: three broken links, and a page that is not in the navigation."""
    shutil.copytree(ROOT / "docs", tmp_path / "docs")
    for path in ROOT.iterdir():
        if path.suffix == ".md":
            shutil.copy(path, tmp_path)
        elif path.name not in ("docs", "site"):
            (tmp_path / path.name).symlink_to(path)
    added = {
        "docs/methods/neuclip.md": "[`jobs`](../../scripts/slurm), [start](../../README.md#quickstart)",
        "CHANGELOG.md": "[hook](scripts/docs_hook.py#L1)",
        "docs/scale.md": "[gone](gone1.md)",
        "README.md": "[gone](docs/gone2.md)",
        "docs/cluster.md": "[gone](data.md#gone3)",
        "docs/new4.md": "# A page that is not in the navigation",
    }
    for page, text in added.items():
        with (tmp_path / page).open("a", encoding="utf-8") as file:
            file.write(f"\n{text}\n")
    repository = "https://example.org/us/here"
    command = [sys.executable, "-m", "mkdocs", "build", "--strict"]
    environment = os.environ | {"REPOSITORY_URL": repository}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode != 0
    warnings = "\n".join(line for line in done.stderr.splitlines() if not line.startswith("INFO"))
    assert warnings.count("WARNING -") == 4, warnings
    assert all(name in warnings for name in ("gone1.md", "docs/gone2.md", "gone3", "new4.md"))

    def links_of(page):
        return set(re.findall(r'href="([^"]*)"', (tmp_path / "site" / page).read_text(encoding="utf-8")))

    assert {f"{repository}/tree/main/scripts/slurm", "../../#quickstart"} <= links_of("methods/neuclip/index.html")
    assert f"{repository}/blob/main/scripts/docs_hook.py#L1" in links_of("changelog/index.html")
    assert {"choosing-a-loss/", "contributing/", "patches/"} <= links_of("index.html")
