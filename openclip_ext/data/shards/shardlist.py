"""Expand the value of ``--train-data`` to a list of shards."""

import glob
import os
import re
from collections.abc import Sequence

from braceexpand import braceexpand

from openclip_ext.cli.errors import check_encoding
from openclip_ext.cli.messages import for_people, without_secrets
from openclip_ext.data.storage import is_local, list_remote, local_path

_GLOB = re.compile(r"[*?\[]")
# On a web server, only ``*`` is a pattern, because URLs may contain ``?`` and ``[...]``. The shell expands ``pipe:`` commands.
_REMOTE_GLOB = re.compile(r"^(?!pipe:)(?:https?:[^?#]*\*|(?!https?:).*[*?\[])")
# Of the shards in a folder.
_SHARD_ENDINGS = (".tar", ".tar.gz", ".tgz")
_TAR_NAME = re.compile(r"([^\s/'\"=]+?)(\.tar(?:\.\w+)?|\.tgz)(?=$|[\s'\"?#|;&>)])")


def expand_components(shards: str | Sequence[str]) -> list[list[str]]:
    """Return one list of shards for each ``::`` component. Local shards have absolute paths.

    Args:
        shards: A path, URL or ``pipe:`` command with brace notation, several of them joined by ``::`` as in OpenCLIP, or a
            list. A local folder means all shards in it. ``*``, ``?`` and ``[...]`` are expanded in local paths and in URLs
            whose storage can list its files.

    Raises:
        ValueError: There are no shards, or a pattern matches no file.
    """
    texts = [shards] if isinstance(shards, str) else list(shards)
    components = [[text] if text.startswith("pipe:") and "::" not in text else text.split("::") for text in texts]
    expanded = [_expand(component) for parts in components for component in parts if component]
    if not expanded:
        raise ValueError(f"no shards: got {shards!r}, expected paths such as 'data/{{00000..00099}}.tar'")
    return expanded


def _expand(component: str) -> list[str]:
    urls: list[str] = []
    folder = _existing_folder(component)
    for rest in braceexpand(component[len(folder) :]):
        url = folder + rest
        if not is_local(url):
            urls.extend(list_remote(url) if _REMOTE_GLOB.search(url) else [url])
            continue
        path = local_path(os.path.expandvars(url))
        known = os.path.commonpath([path, local_path(os.path.expandvars(folder))])
        is_pattern = _GLOB.search(path[len(known) :]) and not os.path.exists(path)
        matches = (
            sorted(glob.glob(glob.escape(known) + path[len(known) :])) if is_pattern else shards_in(path) or [path]
        )
        if not matches:
            raise ValueError(f"no file matches {url!r}: correct the pattern, and quote it")
        urls.extend(matches)
    return urls


def shards_in(folder: str) -> list[str]:
    """Return the sorted paths of the shards in a local folder, such as img2dataset's output; empty for other paths."""
    if not os.path.isdir(folder):
        return []
    return sorted(os.path.join(folder, name) for name in os.listdir(folder) if name.endswith(_SHARD_ENDINGS))


def _existing_folder(component: str) -> str:
    """Return the beginning of a text that is an existing local folder, whose name may contain ``[...]`` or ``{...}``."""
    folder = ""
    for end in (found.end() for found in re.finditer("/", component) if is_local(component)):
        if not os.path.isdir(local_path(os.path.expandvars(component[:end]))):
            break
        folder = component[:end]
    return folder


def expand_shards(shards: str | Sequence[str]) -> list[str]:
    """Return the shards of all components in one list; also raise ValueError if one occurs twice or is not UTF-8."""
    urls = [url for component in expand_components(shards) for url in component]
    check_encoding(urls)
    seen: dict[object, str] = {}
    for url in urls:
        identity = _identity(url)
        if identity in seen:
            other = "" if seen[identity] == url else f" (also as {seen[identity]})"
            raise ValueError(for_people(f"the shard {url} is given twice{other}: name it once"))
        seen[identity] = url
    return urls


def _identity(url: str) -> object:
    """Return a value that is equal for all paths of the same file, including links."""
    if not is_local(url):
        return without_secrets(url)
    try:
        status = os.stat(url)
    except OSError:
        return url
    return (status.st_dev, status.st_ino) if status.st_nlink > 1 else os.path.realpath(url)


def shard_name(url: str) -> str:
    """Return the file name of the tar in a path, URL or ``pipe:`` command; without a tar name, the full text."""
    found = None if is_local(url) else _TAR_NAME.search(url)
    return found.group(0) if found else os.path.basename(without_secrets(url)) or without_secrets(url)


def sibling(url: str, replace: str) -> str | None:
    """Return the path, URL or command for the file ``replace`` in a shard's folder; None if ``url`` has no tar name."""
    if is_local(url):
        return os.path.join(os.path.dirname(url), replace)
    found = _TAR_NAME.search(url)
    return None if found is None else url[: found.start()] + replace + url[found.end() :]
