"""Exclude the samples whose uid is not in a list. DataComp publishes its subsets as lists of uids.

The list is a ``.npy`` file with two 64-bit numbers per uid. A sample's json has the entry ``uid`` with 32 hexadecimal digits.
"""

import contextlib
import json
import os
from concurrent.futures import ProcessPoolExecutor
from itertools import repeat
from multiprocessing import get_context

import numpy as np

from openclip_ext.data.manifest.manifest import Manifest
from openclip_ext.data.manifest.scan import Shard, with_bar
from openclip_ext.data.processes import available_cores, begin_worker
from openclip_ext.data.shards import tar
from openclip_ext.data.storage import Storage

UID = np.dtype([("f0", "<u8"), ("f1", "<u8")])
_wanted: np.ndarray  # ascending uids to keep, up to a billion; set once in each worker process


def read_uids(path: str | os.PathLike[str]) -> np.ndarray:
    """Return the ascending uids ``(k,)`` of a file; raise ValueError if the file has another format or is empty."""
    values = np.load(path, allow_pickle=False)
    if values.dtype.names is None and values.ndim == 2 and values.shape[1] == 2 and values.dtype == np.uint64:
        values = np.ascontiguousarray(values).view(UID)[:, 0]
    if values.ndim != 1 or not len(values) or values.dtype.names is None or len(values.dtype.names) != 2:
        raise ValueError(f"{path}: expected DataComp's list of uids, two 64-bit numbers each, found {values.dtype}")
    return np.unique(values.astype(UID))


def keep_listed(manifest: Manifest, uids: np.ndarray, storage: Storage, workers: int | None = None) -> Manifest:
    """Return a manifest that also excludes samples without a listed uid; raise ValueError if no sample has one."""
    processes = min(workers or available_cores(), len(manifest.shards))
    with ProcessPoolExecutor(processes, get_context("fork"), initializer=_begin, initargs=(uids,)) as pool:
        found = pool.map(_unlisted, manifest.shards, repeat(storage))
        unlisted = list(with_bar(found, len(manifest.shards), "reading uids"))
    positions = np.concatenate(unlisted)
    if len(positions) == manifest.num_samples:
        raise ValueError("no sample's uid is in the list: give the list of this data set")
    return manifest.without(positions)


def _begin(uids: np.ndarray) -> None:
    global _wanted
    begin_worker()
    _wanted = uids


def _unlisted(shard: Shard, storage: Storage) -> np.ndarray:
    uids = np.zeros(shard.num_samples, dtype=UID)
    has_uid = np.zeros(shard.num_samples, dtype=bool)
    try:
        with storage.open(shard.url) as file:
            samples = tar.TarArchive(file).samples(frozenset({"json"}))
            for place, sample in zip(range(shard.num_samples), samples, strict=False):
                with contextlib.suppress(ValueError, KeyError, TypeError):
                    uid = json.loads(sample.fields["json"])["uid"]
                    uids[place], has_uid[place] = (int(uid[:16], 16), int(uid[16:32], 16)), True
    except tar.STREAM_ERRORS as error:
        # Samples after a corrupt part stay without a uid, so they are excluded. An unavailable file must not exclude samples.
        if isinstance(error, OSError) and "error" not in shard.problems:
            raise
    places = np.minimum(np.searchsorted(_wanted, uids), len(_wanted) - 1)
    return shard.first_index + np.flatnonzero(~(has_uid & (_wanted[places] == uids)))
