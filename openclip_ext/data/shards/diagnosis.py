"""Explain why a shard has no usable sample, and how to fix it."""

import contextlib
import json
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import islice

from openclip_ext.data.shards import tar
from openclip_ext.data.sources.keys import DATA_FORMATS, parse_keys
from openclip_ext.data.storage import Storage, is_local

_MAX_MEMBERS = 10_000
_SHOWN = 8
_AGAIN = "download it again"
_CONVERT = "make a tar of it, with the files of a sample next to each other"
_DECOMPRESS = "decompress it, or use .tar.gz, .tar.bz2 or .tar.xz"
# First bytes of files that are not tars, with their type and the fix.
_SIGNATURES = {
    b"version https://git-lfs": "a Git LFS pointer; run git lfs pull",
    b"<": f"a page of HTML or XML; {_AGAIN}, signed in if the server requires it",
    b"PK\x03\x04": f"a zip archive; {_CONVERT}",
    b"PAR1": f"a Parquet file; {DATA_FORMATS}",
    b"{": "a JSON file; give the shards that it describes",
    b"[": "a JSON file; give the shards that it describes",
    b"\x5d\x00\x00": f"an LZMA-compressed file (.lzma); {_DECOMPRESS}",
    b"\x28\xb5\x2f\xfd": f"a zstd-compressed file; {_DECOMPRESS}",
    b"7z\xbc\xaf\x27\x1c": f"a 7z archive; {_CONVERT}",
    b"Rar!": f"a rar archive; {_CONVERT}",
}


def explain(url: str, image_key: str, caption_key: str, storage: Storage, error: str = "") -> str:
    """Return why no sample of a shard has both an image and a caption, and a fix. ``error`` is from the shard's scan."""
    if is_local(url) and os.path.isdir(url):
        return f"it is a folder; {DATA_FORMATS}"
    if url.lower().endswith((".csv", ".tsv")):
        return "it is a CSV file, which needs no manifest; pass it to --train-data, with --dataset-type csv or auto"
    if error.startswith("cannot be read"):
        return f"it {error}"
    images, captions = parse_keys(image_key, allow_json=False), parse_keys(caption_key, allow_json=True)
    wanted = {f"{key.field}:{key.entry}": key.field for key in captions if key.entry is not None}
    names: list[tuple[str, str]] = []
    entries: Counter[str] = Counter()
    problem = ""
    try:
        with storage.open(url, headers_only=True) as file:
            start = file.peek(tar.BLOCK)[: tar.BLOCK]
            archive = tar.TarArchive(file)
            for member in islice(archive.members(), _MAX_MEMBERS):
                if member.is_file:
                    names.append(tar.split_name(member.name) or (member.name, ""))
                    if names[-1][1] in wanted.values():
                        entries.update(_text_entries(names[-1][1], archive.read_at(member.data, member.size)))
    except OSError as unreadable:
        return f"it cannot be read: {unreadable.strerror or unreadable}"
    except tar.STREAM_ERRORS as broken:
        problem = str(broken) or type(broken).__name__
    if not names:
        return _explain_no_tar(start, problem)
    if {field for _, field in names}.intersection(wanted.values()) and not entries.keys() & wanted.keys():
        found = _listed(Counter(field for _, field in names) + entries)
        return f"its samples have the fields {found}; name the caption entry with --caption-key json:ENTRY"
    return _explain_unpaired(names, {key.field for key in images}, {key.field for key in captions})


def _text_entries(field: str, data: bytes) -> Iterator[str]:
    """Yield ``json:ENTRY`` for each entry of a JSON object that may contain captions (a non-blank text or a list)."""
    with contextlib.suppress(ValueError, RecursionError, AttributeError):
        for name, entry in json.loads(data).items():
            if isinstance(entry, str | list) and str(entry).strip():
                yield f"{field}:{name}"


def _listed(counts: Counter[str]) -> str:
    return ", ".join(f"{field or '(no ending)'} ({number:,})" for field, number in counts.most_common(_SHOWN))


def _explain_no_tar(start: bytes, problem: str) -> str:
    for signature, what in _SIGNATURES.items():
        if start.lstrip().startswith(signature):
            return f"it is not a tar but {what}"
    if not any(start):
        return f"it is empty; remove it, or {_AGAIN}"
    return f"it is corrupt, or not a tar: {problem}, the file begins with {start[:16]!r}; {_AGAIN}"


def _explain_unpaired(names: Sequence[tuple[str, str]], images: set[str], captions: set[str]) -> str:
    """Explain why no sample of a tar has both an image and a caption. ``names`` contains the key and field of each member."""
    fields = Counter(field for _, field in names)
    with_image, with_caption = ({key for key, field in names if field in wanted} for wanted in (images, captions))
    if with_image & with_caption:
        return "the files of a sample are not next to each other; sort them: tar --sort=name -cf NEW.tar FOLDER"
    if {key.rpartition("/")[2] for key in with_image} & {key.rpartition("/")[2] for key in with_caption}:
        return "images and captions are in different folders; put the files of a sample into one folder, next to each other"
    last = {field.rpartition(".")[2] for field in fields}
    if any("." in field for field in fields) and last & images and last & captions:
        return (
            "names have dots before the ending, and the first dot ends a sample's key (WebDataset's rule); rename the "
            f"files, for example {'.'.join(names[0])}"
        )
    return f"its samples have the fields {_listed(fields)}; name image and caption fields with --image-key and --caption-key"
