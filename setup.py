"""The README for a package index, where a relative link leads nowhere: REPOSITORY_URL completes it when a release is built.

All else is in pyproject.toml.
"""

import os
import re
from pathlib import Path

from setuptools import setup

_LINK = re.compile(r"(!?\[[^\]]*\]\()(?!\w+:|#)([^)\s]+)\)")


def readme(repository: str) -> str:
    """README.md, with links into the repository at an address, or as it is without one."""
    text = Path(__file__).with_name("README.md").read_text(encoding="utf-8")
    if not repository:
        return text
    # "raw" is the file itself, which a picture needs; "blob" the page about it.
    return _LINK.sub(
        lambda link: f"{link[1]}{repository}/{'raw' if link[1].startswith('!') else 'blob'}/HEAD/{link[2]})", text
    )


_repository = os.environ.get("REPOSITORY_URL", "").rstrip("/")
setup(
    long_description=readme(_repository),
    long_description_content_type="text/markdown",
    project_urls={"Source": _repository} if _repository else {},
)
