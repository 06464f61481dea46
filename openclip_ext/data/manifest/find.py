"""Find the manifest of a training run, or create one."""

import hashlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from openclip_ext.cli.messages import get_logger, without_secrets
from openclip_ext.data.manifest.manifest import Manifest, ManifestError
from openclip_ext.data.shards.shardlist import expand_shards
from openclip_ext.data.sources.keys import ANY_FIELD, DEFAULT_CAPTION_KEY, DEFAULT_IMAGE_KEY
from openclip_ext.data.storage import DEFAULT_STORAGE, Storage, is_local

logger = get_logger(__name__)

_MAX_LINES = 20


def find_or_create_manifest(
    train_data: str | Sequence[str],
    manifest: str | os.PathLike[str] | None = None,
    image_key: str = DEFAULT_IMAGE_KEY,
    caption_key: str = DEFAULT_CAPTION_KEY,
    storage: Storage = DEFAULT_STORAGE,
) -> Manifest:
    """Return the manifest of a training run: the given manifest, a manifest next to the shards, or a new one.

    For the arguments, see :meth:`Manifest.scan`. A manifest that does not match the shards raises an error, because a new
    scan could change the indices, which checkpoints use. Collective: all ranks call it; rank 0 does the work.

    Raises:
        ManifestError: No valid manifest was found or could be made. Ranks other than rank 0 raise UsageError.
    """
    # Imported late, because the manifest's command line works without torch.
    from openclip_ext import distributed

    def find() -> Manifest:
        urls = expand_shards(train_data)
        if manifest is None:
            found = _find_or_create(urls, image_key, caption_key, storage)
        else:
            found = Manifest.load(manifest)
            found.verify(urls)
        _log_report(found)
        return found

    return distributed.on_rank0(find)


def _find_or_create(urls: Sequence[str], image_key: str, caption_key: str, storage: Storage) -> Manifest:
    free = []
    for path, manifest in candidates(urls, image_key, caption_key):
        if manifest is None:
            free.append(path)
            continue
        if manifest.verify(urls):
            _save_first_writable(manifest, [path])
        logger.info(f"Using the manifest {path}: {manifest.num_samples:,} samples in {len(urls):,} shards.")
        return manifest
    logger.info(f"No manifest yet: counting the samples of {len(urls):,} shards.")
    manifest = Manifest.scan(urls, image_key, caption_key, storage=storage)
    _save_first_writable(manifest, free)
    return manifest


def cache_folder() -> Path:
    """Return the folder for manifests that cannot be written next to their shards."""
    return Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "openclip_ext"


def candidates(urls: Sequence[str], image_key: str, caption_key: str) -> Iterator[tuple[Path, Manifest | None]]:
    """Yield possible paths of a manifest for these shards and keys, the preferred path first, each with its manifest.

    The manifest is None if the file does not exist. A file of different shards or keys is skipped. The key :data:`ANY_FIELD`
    accepts a manifest with any keys, because the indices do not depend on the keys. The last path is in the user's cache.
    """
    identity = "\n".join([image_key, caption_key, *sorted(map(without_secrets, urls))])
    named = f"manifest-{hashlib.blake2b(identity.encode(), digest_size=6).hexdigest()}.json"
    # Without a home folder, the path would be a folder ``~`` in the working directory.
    paths = [] if str(cache_folder()).startswith("~") else [cache_folder() / named]
    if all(map(is_local, urls)):
        folder = Path(os.path.commonpath([os.path.dirname(url) for url in urls]))
        paths = [folder / "manifest.json", folder / named, *paths]
    for path in paths:
        try:
            manifest = Manifest.load(path)
        except FileNotFoundError:
            yield path, None
        except (OSError, ManifestError) as error:
            logger.warning(f"{error}. This file is ignored, and not changed.")
        else:
            has_keys = (manifest.image_key, manifest.caption_key) == (image_key, caption_key)
            if manifest.is_of(urls) and (has_keys or image_key == ANY_FIELD):
                yield path, manifest


def _save_first_writable(manifest: Manifest, paths: Sequence[Path]) -> None:
    for path in paths:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            manifest.save(path)
        except OSError as error:
            logger.debug(f"Cannot write the manifest {path}: {error}")
            continue
        logger.info(f"Wrote the manifest {path}.")
        return
    logger.warning("The manifest could not be written anywhere: the shards will be scanned again in the next run.")


def _log_report(manifest: Manifest) -> None:
    report = list(manifest.report())
    for line in report[:_MAX_LINES]:
        logger.warning(line)
    if report[_MAX_LINES:]:
        logger.warning(f"... and {len(report) - _MAX_LINES} more shards with problems")
    if len(manifest.left_out):
        logger.info(
            f"The manifest excludes {len(manifest.left_out):,} of {manifest.num_samples:,} samples, and changes no index."
        )
