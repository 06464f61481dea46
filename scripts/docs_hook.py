"""MkDocs hook: add pages from outside docs/, and rewrite links to files outside docs/.

In the repository, links are relative to the file that contains them. On the site, a link points to the page of the file. If
the file is not a page, the link points to the repository at ``repo_url`` or, without ``repo_url``, becomes plain text.
"""

import os
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
# File in the repository -> page on the site.
PAGES_OUTSIDE = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "patches/README.md": "patches.md",
    "scripts/bench/README.md": "speed.md",
}
_LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s#]+)(#[^)\s]*)?\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for source, page in PAGES_OUTSIDE.items():
        files.append(File.generated(config, page, abs_src_path=str(ROOT / source)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    source = Path(page.file.abs_src_path or ROOT)
    pages = {Path(file.abs_src_path): file.src_uri for file in files if file.abs_src_path}

    def rewrite(link: re.Match[str]) -> str:
        image, text, target, anchor = link.group(1), link.group(2), link.group(3), link.group(4) or ""
        if "://" in target or target.startswith("mailto:"):
            return link.group()
        linked = Path(os.path.normpath(source.parent / target))
        if linked in pages:
            return f"{image}[{text}]({os.path.relpath(pages[linked], Path(page.file.src_uri).parent)}{anchor})"
        if not linked.exists() or not linked.is_relative_to(ROOT):
            return link.group()  # MkDocs reports this broken link
        if not config.repo_url:
            return text
        kind = "tree" if linked.is_dir() else "blob"
        path = linked.relative_to(ROOT).as_posix()
        return f"[{text}]({config.repo_url.rstrip('/')}/{kind}/main/{path}{anchor})"

    return _LINK.sub(rewrite, markdown)
