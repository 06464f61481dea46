"""Explain why a shard has no usable sample, and what to do about it."""

import os
from collections import Counter
from collections.abc import Sequence
from itertools import islice

from openclip_ext.data.shards import tar
from openclip_ext.data.sources.spec import Key
from openclip_ext.data.storage import Storage, is_local

_MEMBERS = 10_000  # enough to see what a shard holds
_SHOWN = 8
_AGAIN = "download it again"
_CONVERT = "make a tar of it, with one sample's files side by side"
# What files begin with that are no tars: what they are, and what to do.
_SIGNATURES: tuple[tuple[bytes, str, str], ...] = (
    (b"version https://git-lfs", "a Git LFS pointer", "run git lfs pull"),
    (b"<", "a page of HTML or XML", f"{_AGAIN}, signed in if the server asks for it"),
    (b"PK\x03\x04", "a zip archive", _CONVERT),
    (b"PAR1", "a parquet file", "make shards of it with img2dataset --input_format parquet"),
    (b"{", "JSON", "give the shards that it describes"),
    (b"[", "JSON", "give the shards that it describes"),
    (b"\x5d\x00\x00", "compressed with LZMA (.lzma)", "decompress it, or use .tar.gz, .tar.bz2 or .tar.xz"),
    (b"\x28\xb5\x2f\xfd", "compressed with zstd", "decompress it, or use .tar.gz, .tar.bz2 or .tar.xz"),
    (b"7z\xbc\xaf\x27\x1c", "a 7z archive", _CONVERT),
    (b"Rar!", "a rar archive", _CONVERT),
)


def explain(url: str, images: Sequence[Key], captions: Sequence[Key], storage: Storage, scanned: str = "") -> str:
    """Say in one sentence why a shard has no sample with image and caption, with the fix.

    Args:
        scanned: What its scan says of the fields and the entries of JSON.
    """
    if is_local(url) and os.path.isdir(url):
        return f"it is a folder; give its shards, such as '{url}/*.tar'"
    if scanned.startswith("cannot be read"):
        return f"it {scanned}"
    try:
        with storage.open(url, headers_only=True) as file:
            start = file.peek(tar.BLOCK)[: tar.BLOCK]
            if not start:
                return f"it is empty (0 bytes); {_AGAIN}"
            archive = tar.TarArchive(file)
            members, problem = [], ""
            try:
                members = [member for member in islice(archive.members(), _MEMBERS) if member.is_file]
            except tar.STREAM_ERRORS as error:
                problem = str(error) or type(error).__name__
    except OSError as error:
        return f"it cannot be read: {error.strerror or error}"
    if not members:
        return _not_a_tar(start, problem)
    if any(key.entry is not None for key in captions) and "json" in scanned:
        return f"it has {scanned}; name the entry of the captions with --caption-key json:ENTRY"
    return _unpaired(members, {key.field for key in images}, {key.field for key in captions})


def _not_a_tar(start: bytes, problem: str) -> str:
    for signature, what, fix in _SIGNATURES:
        if start.lstrip().startswith(signature):
            return f"it is no tar but {what}; {fix}"
    if not any(start):
        return f"it has no files; leave it out, or {_AGAIN}"
    return f"it is damaged, or no tar: {problem}, the file begins with {start[:16]!r}; {_AGAIN}"


def _unpaired(members: Sequence[tar.Member], images: set[str], captions: set[str]) -> str:
    """Say why no sample of a tar has both an image and a caption."""
    fields: Counter[str] = Counter()
    keys: dict[str, set[str]] = {"image": set(), "caption": set()}
    for member in members:
        key, field = tar.split_name(member.name) or ("", "")
        fields[field] += 1
        for what, wanted in (("image", images), ("caption", captions)):
            if field in wanted:
                keys[what].add(key)
    if keys["image"] & keys["caption"]:
        return "the files of a sample do not lie side by side; sort them: tar --sort=name -cf NEW.tar FOLDER"
    if {key.rpartition("/")[2] for key in keys["image"]} & {key.rpartition("/")[2] for key in keys["caption"]}:
        return "images and captions are in different folders; put the files of a sample into one folder, side by side"
    last = {field.rpartition(".")[2] for field in fields}
    if any("." in field for field in fields) and last & images and last & captions:
        return (
            "names have dots before the ending, and the first dot ends a sample's key (WebDataset's rule); rename the "
            f"files, for example {members[0].name}"
        )
    found = ", ".join(f"{field or '(no ending)'} ({number:,})" for field, number in fields.most_common(_SHOWN))
    return f"its samples have the fields {found}; name those of image and caption with --image-key and --caption-key"
