"""What pyproject.toml cannot say: the packages, and the README for a package index.

A relative link of the README leads nowhere there: REPOSITORY_URL completes it when a release is built. The folder eval is
installed as openclip_ext.eval: nobody wants a package named eval among the installed ones.
"""

import os
import re
from pathlib import Path

from setuptools import find_packages, setup

_LINK = re.compile(r"(!?\[[^\]]*\]\()(?!\w+:|#)([^)\s]+)\)")


def readme(repository: str) -> str:
    """Return README.md, with links into the repository at an address, or as it is without one."""
    text = Path(__file__).with_name("README.md").read_text(encoding="utf-8")
    if not repository:
        return text
    # "raw" is the file itself, which a picture needs; "blob" the page about it.
    return _LINK.sub(
        lambda link: f"{link[1]}{repository}/{'raw' if link[1].startswith('!') else 'blob'}/HEAD/{link[2]})", text
    )


_repository = os.environ.get("REPOSITORY_URL", "").rstrip("/")
setup(
    packages=[
        *find_packages(include=["openclip_ext*"], exclude=["openclip_ext.eval"]),
        *(f"openclip_ext.{name}" for name in find_packages(include=["eval*"])),
    ],
    package_dir={"openclip_ext.eval": "eval"},
    long_description=readme(_repository),
    long_description_content_type="text/markdown",
    project_urls={"Source": _repository} if _repository else {},
)
