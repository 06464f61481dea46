"""Find the manifest of a training run, or make one."""

import hashlib
import logging
import os
from collections.abc import Sequence
from pathlib import Path

from openclip_ext.cli.messages import without_secrets
from openclip_ext.data.manifest.manifest import Manifest, ManifestError
from openclip_ext.data.shards.shardlist import expand_shards
from openclip_ext.data.sources.keys import ANY_FIELD, DEFAULT_CAPTION_KEY, DEFAULT_IMAGE_KEY
from openclip_ext.data.storage import DEFAULT_STORAGE, Storage, is_local


def find_or_create_manifest(
    train_data: str | Sequence[str],
    manifest: str | os.PathLike | None = None,
    image_key: str = DEFAULT_IMAGE_KEY,
    caption_key: str = DEFAULT_CAPTION_KEY,
    storage: Storage = DEFAULT_STORAGE,
) -> Manifest:
    """Return the manifest of a training run: the given one, the one next to the shards, or a new one.

    With several processes rank 0 looks and scans, and the others get the result. A new one is written to the first of
    :func:`places` that is free. One that no longer fits its shards is an error, because after a new scan the indices in a
    checkpoint could mean other samples. For the arguments, see :meth:`Manifest.scan`.

    Raises:
        ManifestError: On every rank, with the reason.
    """
    # The manifest's own command line does without torch.
    from openclip_ext import distributed

    found: Manifest | None = None
    failure: Exception | None = None
    if distributed.is_master():
        try:
            urls = expand_shards(train_data)
            if manifest is None:
                found = _find_or_create(urls, image_key, caption_key, storage)
            else:
                found = Manifest.load(manifest)
                found.verify(urls)
            _log_report(found)
        except Exception as error:
            failure = error
    found, message = distributed.broadcast_object((found, None if failure is None else str(failure)))
    if failure is not None:
        raise failure
    if message is not None:
        raise ManifestError(message)
    return found


def _find_or_create(urls: Sequence[str], image_key: str, caption_key: str, storage: Storage) -> Manifest:
    free = []
    for path in places(urls, image_key, caption_key):
        try:
            manifest = load_if_of(path, urls, image_key, caption_key)
        except FileNotFoundError:
            free.append(path)
            continue
        if manifest is not None:
            if manifest.verify(urls):
                _save_somewhere(manifest, [path])
            logging.info(f"Using the manifest {path}: {manifest.num_samples:,} samples in {len(urls):,} shards.")
            return manifest
    logging.info(f"No manifest yet: counting the samples of {len(urls):,} shards.")
    manifest = Manifest.scan(urls, image_key, caption_key, storage=storage)
    _save_somewhere(manifest, free)
    return manifest


def places(urls: Sequence[str], image_key: str, caption_key: str) -> list[Path]:
    """Return the paths that a manifest of these shards may have, in order of preference; the last is in the user's cache."""
    identity = "\n".join([image_key, caption_key, *sorted(map(without_secrets, urls))])
    named = f"manifest-{hashlib.blake2b(identity.encode(), digest_size=6).hexdigest()}.json"
    cache = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "openclip_ext" / named
    if not all(map(is_local, urls)):
        return [cache]
    folder = Path(os.path.commonpath([os.path.dirname(url) for url in urls]))
    return [folder / "manifest.json", folder / named, cache]


def load_if_of(path: Path, urls: Sequence[str], image_key: str, caption_key: str) -> Manifest | None:
    """Return the manifest at ``path`` if it has exactly these shards and keys, else None; raise FileNotFoundError.

    If any field will do, it is that of any keys: the indices are the same.
    """
    try:
        manifest = Manifest.load(path)
    except FileNotFoundError:
        raise
    except (OSError, ManifestError) as error:
        logging.warning(f"{error}. It stays as it is.")
        return None
    same_keys = (manifest.image_key, manifest.caption_key) == (image_key, caption_key)
    return manifest if manifest.is_of(urls) and (same_keys or image_key == ANY_FIELD) else None


def _save_somewhere(manifest: Manifest, paths: Sequence[Path]) -> None:
    for path in paths:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            manifest.save(path)
        except OSError as error:
            logging.debug(f"Cannot write the manifest {path}: {error}")
            continue
        logging.info(f"Wrote the manifest {path}.")
        return
    logging.warning("The manifest could not be written anywhere: the shards will be scanned again next time.")


def _log_report(manifest: Manifest) -> None:
    report = list(manifest.report())
    for line in report[:20]:
        logging.warning(line)
    if report[20:]:
        logging.warning(f"... and {len(report) - 20} more shards with problems")
    if len(manifest.left_out):
        logging.info(
            f"The manifest leaves out {len(manifest.left_out):,} of {manifest.num_samples:,} samples; no index changes."
        )
