"""Image and caption keys of the samples in shards, without importing torch, so that ``openclip-ext manifest`` starts fast."""

import json
import re
from functools import cache
from typing import Any, NamedTuple

DEFAULT_IMAGE_KEY = "jpg;png;jpeg;webp"
DEFAULT_CAPTION_KEY = "txt"
DATA_FORMATS = "expected shards, such as 'FOLDER/*.tar', or a CSV, Parquet or JSON-lines file of images and captions"
# Names of columns that are accepted, in lower case, if the user named no column and the table has exactly one of them.
IMAGE_COLUMNS = frozenset({"filepath", "path", "image", "img", "image_path", "file_name", "filename"})
CAPTION_COLUMNS = frozenset({"title", "caption", "captions", "text", "txt"})
# Names of columns with classes, in lower case.
LABEL_COLUMNS = ("label", "labels", "class", "class_name", "category")
# Used as image key and caption key of a manifest that only defines indices.
ANY_FIELD = "*"
_SENTENCE_END = re.compile(r"(?<=[.!?])\s+|(?<=[。！？])|\n+")
# JSON can contain half of a surrogate pair. This is not valid text, and tokenizers raise an error.
_LONE_SURROGATE = re.compile("[\ud800-\udfff]")


class BadSampleError(ValueError):
    """A sample lacks its image or caption, or does not decode. The loader skips and counts the sample."""


class Key(NamedTuple):
    """The place of an image or a caption in a sample: a field of the tar, or an entry of a json field."""

    field: str
    entry: str | None = None


@cache
def parse_keys(text: str, allow_json: bool) -> tuple[Key, ...]:
    """Parse ``--image-key`` or ``--caption-key``: alternatives in order of preference, separated by ``;``.

    ``jpg`` is a field of the tar, and ``json:caption`` is entry "caption" of field "json". Raise ValueError for other forms,
    also for ``json`` without an entry, because the whole JSON text is no caption.
    """
    keys = []
    for part in filter(None, (part.strip() for part in text.split(";"))):
        name, colon, entry = part.partition(":")
        has_entries = allow_json and name.rpartition(".")[2].lower() == "json"
        if has_entries != bool(colon) or (colon and not entry):
            json_entry = " or an entry of a json field such as 'json:caption'" if allow_json else ""
            raise ValueError(f"the key {part!r} is not understood: expected a field such as 'jpg'{json_entry}")
        keys.append(Key(name.lower(), entry or None))
    if not keys:
        raise ValueError(f"no key in {text!r}: expected names of tar fields such as 'jpg;png'")
    return tuple(keys)


def sentences_of(caption: str) -> list[str]:
    """Return a caption's sentences, at least one. They end with ``.!?`` and a space, with ``。！？``, or with the line."""
    return [part for part in map(str.strip, _SENTENCE_END.split(caption)) if part] or [caption]


def captions_of(data: bytes, key: Key, what: str = "caption") -> list[str]:
    """Return the captions (at least one) in a field. A json entry may be a list, whose blank texts are left out.

    ``what`` names the captions in errors.

    Raises:
        BadSampleError: There is no caption that is not blank, or the field does not decode.
    """
    try:
        text = data.decode("utf-8-sig")  # without the byte order mark of some editors on Windows
        entry = text if key.entry is None else json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BadSampleError(f"the {what} ({key.field}) does not decode: {error}") from error
    if key.entry is not None:
        entry = entry.get(key.entry) if isinstance(entry, dict) else None
    captions: list[Any] = entry if isinstance(entry, list) else [entry]
    if not captions or not all(isinstance(caption, str) for caption in captions):
        raise BadSampleError(
            f"no {what}: expected a text, or a list of texts, at {key.entry!r} in {key.field}, found {text[:80]}"
        )
    if any(map(_LONE_SURROGATE.search, captions)):
        raise BadSampleError(f"the {what} ({key.field}) does not decode: it has a lone surrogate")
    captions = [caption for caption in captions if caption.strip()]
    if not captions:
        raise BadSampleError(f"no {what}: the text is empty")
    return captions
