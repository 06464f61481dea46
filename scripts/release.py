"""Build the archives of a release and check them: ``python scripts/release.py DIST --repository https://HOST/OWNER/NAME``.

A package index shows README.md outside the repository, so relative links do not work there. The archives are therefore built
from a copy of the sources with absolute links.
"""

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
FILES = ("pyproject.toml", "requirements.txt", "README.md", "LICENSE")
_LINK = re.compile(r"(!?\[(?:[^\[\]]|!\[[^\]]*\]\([^)]*\))*\]\()(?!\w+:|#)([^)\s]+)\)")


def make_links_absolute(text: str, repository: str, version: str) -> str:
    """Return Markdown in which relative links point to the files of a version in the repository."""
    # The link of a figure needs the address of the file ("raw"). The address with "blob" is a page that shows the file.
    return _LINK.sub(
        lambda link: f"{link[1]}{repository}/{'raw' if link[1].startswith('!') else 'blob'}/{version}/{link[2]})", text
    )


def build(output: Path, repository: str, version: str, *options: str) -> None:
    """Build and check the source archive and the wheel.

    Args:
        output: Folder for the archives.
        repository: Address of the repository.
        version: Tag, branch or commit to which the links point.
        options: Flags for ``python -m build``.
    """
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder)
        shutil.copytree(ROOT / "openclip_ext", copy / "openclip_ext", ignore=shutil.ignore_patterns("__pycache__"))
        for name in FILES:
            shutil.copy(ROOT / name, copy)
        readme = copy / "README.md"
        readme.write_text(make_links_absolute(readme.read_text("utf-8"), repository, version), "utf-8")
        project = copy / "pyproject.toml"
        urls = f'[project.urls]\nSource = "{repository}"\n\n[project.scripts]'
        project.write_text(project.read_text("utf-8").replace("[project.scripts]", urls), "utf-8")
        subprocess.run([sys.executable, "-m", "build", "--outdir", output, *options, copy], check=True)
    archives = sorted(map(str, output.iterdir()))
    subprocess.run([sys.executable, "-m", "twine", "check", "--strict", *archives], check=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("output", type=Path, metavar="DIST", help="folder for the archives")
    parser.add_argument("--repository", required=True, help="address of the repository")
    parser.add_argument("--version", default="HEAD", help="tag that README's links point to (default: HEAD)")
    parser.add_argument("--no-isolation", action="store_true", help="build with the packages of this environment")
    args = parser.parse_args()
    build(args.output.resolve(), args.repository.rstrip("/"), args.version, *["--no-isolation"] * args.no_isolation)


if __name__ == "__main__":
    main()
