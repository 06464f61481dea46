"""Finding the manifest of a training run, or making one."""

import hashlib
import logging
import os
from collections.abc import Sequence
from pathlib import Path

from openclip_ext.data.manifest.manifest import DamagedManifestError, Manifest, ManifestError
from openclip_ext.data.shardlist import expand_shards
from openclip_ext.data.spec import DEFAULT_CAPTION_KEY, DEFAULT_IMAGE_KEY
from openclip_ext.data.storage import is_local

FILE_NAME = "manifest.json"


def find_or_create_manifest(
    train_data: str | Sequence[str],
    manifest: str | os.PathLike | None = None,
    image_key: str = DEFAULT_IMAGE_KEY,
    caption_key: str = DEFAULT_CAPTION_KEY,
) -> Manifest:
    """Return the manifest of a training run: the given one, the one next to the shards, or a new one.

    With several processes rank 0 looks and scans, and the others get the result. A new one is written as
    ``manifest.json`` to the shards' common folder, or as ``manifest-HASH.json`` if that name is taken by one of other
    shards; where the folder cannot be written to, to the user's cache folder. One that was
    found but no longer fits its shards is an error, not a reason to scan again: the indices in a checkpoint would
    silently mean other samples.

    Args:
        train_data: Shards, as in :meth:`Manifest.scan`.
        manifest: Path of the manifest to use; None to look for one.
        image_key, caption_key: As in :meth:`Manifest.scan`.

    Raises:
        ManifestError: On every rank, with the reason.
    """
    # The manifest's own command line does without torch.
    from openclip_ext import distributed

    found: Manifest | None = None
    failure: Exception | None = None
    if distributed.is_master():
        try:
            found = _find_or_create(train_data, manifest, image_key, caption_key)
        except Exception as error:
            failure = error
    found, message = distributed.broadcast_object((found, None if failure is None else str(failure)))
    if failure is not None:
        raise failure
    if message is not None:
        raise ManifestError(message)
    return found


def _find_or_create(
    train_data: str | Sequence[str], given: str | os.PathLike | None, image_key: str, caption_key: str
) -> Manifest:
    urls = expand_shards(train_data)
    if given is not None:
        try:
            manifest = Manifest.load(given)
        except DamagedManifestError as error:
            raise ManifestError(f"{error}. Make it again: python -m openclip_ext.data.manifest SHARDS") from error
        manifest.verify(urls)
        _log_report(manifest)
        return manifest
    places = _places(urls, image_key, caption_key)
    free = []
    for path in places:
        try:
            manifest = Manifest.load(path)
        except FileNotFoundError:
            free.append(path)
        except DamagedManifestError as error:
            logging.warning(f"{error}. It is made again.")
            free.append(path)
        except (OSError, ManifestError):
            continue  # somebody else's file
        else:
            if _is_of(manifest, urls, image_key, caption_key):
                if manifest.verify():
                    _save_somewhere(manifest, [path])
                logging.info(f"Using the manifest {path}: {manifest.num_samples:,} samples in {len(urls):,} shards.")
                _log_report(manifest)
                return manifest
    logging.info(f"No manifest yet: counting the samples of {len(urls):,} shards.")
    manifest = Manifest.scan(urls, image_key, caption_key)
    _log_report(manifest)
    _save_somewhere(manifest, free)
    return manifest


def _places(urls: Sequence[str], image_key: str, caption_key: str) -> list[Path]:
    """Return where a manifest of these shards may lie, in order of preference."""
    identity = "\n".join([image_key, caption_key, *sorted(urls)])
    named = f"manifest-{hashlib.blake2b(identity.encode(), digest_size=6).hexdigest()}.json"
    folder = common_folder(urls)
    places = [folder / FILE_NAME, folder / named] if folder is not None else []
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return [*places, Path(cache) / "openclip_ext" / named]


def place_beside(urls: Sequence[str], image_key: str, caption_key: str) -> Path:
    """Return where a new manifest goes beside its shards: where training looks, and not over one of other shards or keys.

    Raises:
        ValueError: The shards are remote.
    """
    if common_folder(urls) is None:
        raise ValueError("the shards are remote: say with --output where to write the manifest")
    first, second, _ = _places(urls, image_key, caption_key)
    try:
        return first if _is_of(Manifest.load(first), urls, image_key, caption_key) else second
    except (FileNotFoundError, DamagedManifestError):
        return first
    except (OSError, ManifestError):
        return second  # somebody else's file


def common_folder(urls: Sequence[str]) -> Path | None:
    """Return the folder that holds all shards, None if some are remote."""
    if not all(is_local(url) for url in urls):
        return None
    return Path(os.path.commonpath([os.path.dirname(url) for url in urls]))


def _is_of(manifest: Manifest, urls: Sequence[str], image_key: str, caption_key: str) -> bool:
    """Return whether a manifest is one of exactly these shards and keys."""
    same_shards = {shard.url for shard in manifest.shards} == set(urls)
    return same_shards and (manifest.image_key, manifest.caption_key) == (image_key, caption_key)


def _save_somewhere(manifest: Manifest, places: Sequence[Path]) -> None:
    for path in places:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            manifest.save(path)
        except OSError as error:
            logging.debug(f"Cannot write the manifest {path}: {error}")
            continue
        logging.info(f"Wrote the manifest {path}.")
        return
    logging.warning("The manifest could not be written anywhere: the shards will be scanned again next time.")


def _log_report(manifest: Manifest, lines: int = 20) -> None:
    report = list(manifest.report())
    for line in report[:lines]:
        logging.warning(line)
    if len(report) > lines:
        logging.warning(f"... and {len(report) - lines} more shards with problems")
    if len(manifest.left_out):
        logging.info(
            f"The manifest leaves out {len(manifest.left_out):,} of {manifest.num_samples:,} samples; no index changes."
        )
