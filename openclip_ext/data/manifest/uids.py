"""Exclude the samples whose uid is not in a list. DataComp publishes its subsets as lists of uids.

A uid is a number of 128 bits. A sample's json has the entry ``uid`` with up to 32 hexadecimal digits.
"""

import contextlib
import json
import os
import re
from concurrent.futures import ProcessPoolExecutor
from itertools import repeat
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

from openclip_ext.cli.messages import get_logger
from openclip_ext.data.manifest.manifest import Manifest
from openclip_ext.data.manifest.scan import Shard, with_bar
from openclip_ext.data.processes import available_cores, begin_worker
from openclip_ext.data.shards import tar
from openclip_ext.data.storage import Storage

logger = get_logger(__name__)

UID = np.dtype([("f0", "<u8"), ("f1", "<u8")])
_HEXADECIMAL = re.compile("[0-9a-fA-F]{1,32}")
_wanted: np.ndarray  # ascending uids to keep, up to a billion; set once in each worker process


def read_uids(path: str | os.PathLike[str]) -> np.ndarray:
    """Return the ascending uids ``(k,)`` of a file.

    The file is an array of NumPy (two 64-bit numbers per uid, as DataComp's lists, or hexadecimal texts), a JSON list of
    hexadecimal texts, or a text file with one uid per line.

    Raises:
        ValueError: The file has another format, or is empty.
    """
    with open(path, "rb") as file:
        is_numpy = file.read(6) == b"\x93NUMPY"
    values = _read_array(path) if is_numpy else _read_texts(Path(path))
    if not len(values):
        raise ValueError(f"--uids {path}: the list is empty: expected at least one uid")
    return np.unique(values)


def _read_array(path: str | os.PathLike[str]) -> np.ndarray:
    try:
        values = np.load(path, allow_pickle=False)
    except ValueError:
        # NumPy's message recommends to load untrusted objects.
        raise ValueError(
            f"--uids {path} is truncated, or contains Python objects: save texts with np.save(FILE, np.array(uids, dtype=str))"
        ) from None
    if values.dtype.kind in "US" and values.ndim == 1:
        return _parsed(path, values.astype(str).tolist())
    if values.dtype.names is None and values.ndim == 2 and values.shape[1] == 2 and values.dtype == np.uint64:
        values = np.ascontiguousarray(values).view(UID)[:, 0]
    if values.ndim != 1 or values.dtype.names is None or len(values.dtype.names) != 2:
        raise ValueError(
            f"--uids {path}: expected DataComp's list of uids, two 64-bit numbers each, or texts, found {values.dtype}"
        )
    return values.astype(UID)


def _read_texts(path: Path) -> np.ndarray:
    try:
        content = path.read_text(encoding="utf-8-sig")
        texts = json.loads(content) if content.lstrip().startswith(("[", "{")) else content.split()
    except (ValueError, RecursionError) as error:
        raise ValueError(
            f"--uids {path}: expected an array from np.save, a JSON list, or a text file with one uid per line ({error})"
        ) from None
    return _parsed(path, texts)


def _parsed(path: str | os.PathLike[str], texts: Any) -> np.ndarray:
    try:
        return np.array([_halves(text) for text in texts], dtype=UID)
    except ValueError as error:
        raise ValueError(
            f"--uids {path}: expected a list of uids of up to 32 hexadecimal digits, found {error}"
        ) from None


def _halves(uid: Any) -> tuple[int, int]:
    """Return the upper and lower 64 bits of a hexadecimal text; leading zeros may be missing, and hyphens are ignored."""
    digits = uid.replace("-", "") if isinstance(uid, str) else ""
    if not _HEXADECIMAL.fullmatch(digits):
        raise ValueError(repr(uid)[:80])
    return divmod(int(digits, 16), 1 << 64)


def keep_listed(manifest: Manifest, uids: np.ndarray, storage: Storage, workers: int | None = None) -> Manifest:
    """Return a manifest that also excludes samples without a listed uid; raise ValueError if no sample has one."""
    processes = min(workers or available_cores(), len(manifest.shards))
    with ProcessPoolExecutor(processes, get_context("fork"), initializer=_begin, initargs=(uids,)) as pool:
        found = pool.map(_unlisted, manifest.shards, repeat(storage))
        unlisted, without_uid = zip(*with_bar(found, len(manifest.shards), "reading uids"), strict=True)
    positions = np.concatenate(unlisted)
    if len(positions) == manifest.num_samples:
        raise ValueError("no sample's uid is in the list: give the list of this data set")
    if count := sum(without_uid):
        logger.warning(
            f"{count:,} of {manifest.num_samples:,} samples have no hexadecimal uid in their json: they are excluded."
        )
    return manifest.without(positions)


def _begin(uids: np.ndarray) -> None:
    global _wanted
    begin_worker()
    _wanted = uids


def _unlisted(shard: Shard, storage: Storage) -> tuple[np.ndarray, int]:
    """Return the indices of a shard's samples without a listed uid, and the number of its samples without a uid."""
    uids = np.zeros(shard.num_samples, dtype=UID)
    has_uid = np.zeros(shard.num_samples, dtype=bool)
    try:
        with storage.open(shard.url) as file:
            samples = tar.TarArchive(file).samples(frozenset({"json"}))
            for place, sample in zip(range(shard.num_samples), samples, strict=False):
                with contextlib.suppress(ValueError, KeyError, TypeError, RecursionError):
                    uids[place], has_uid[place] = _halves(json.loads(sample.fields["json"])["uid"]), True
    except tar.STREAM_ERRORS as error:
        # Samples after a corrupt part stay without a uid, so they are excluded. An unavailable file must not exclude samples.
        if isinstance(error, OSError) and "error" not in shard.problems:
            raise
    places = np.minimum(np.searchsorted(_wanted, uids), len(_wanted) - 1)
    unlisted = shard.first_index + np.flatnonzero(~(has_uid & (_wanted[places] == uids)))
    return unlisted, int((~has_uid).sum())
