"""The manifest: the number of samples in each shard, and so the index of every sample.

The index of a sample is the first index of its shard plus its position in the tar. It is dense, unique, stable, and
known before training starts, independent of the keys in the tar.

``manifest.py`` holds the manifest itself, ``search.py`` finds one for a training run, ``command.py`` is the command line::

    openclip-ext manifest 'data/{00000..00099}.tar' [--output PATH]
"""

from openclip_ext.data.manifest.command import main
from openclip_ext.data.manifest.manifest import DamagedManifestError, Manifest, ManifestError, Shard
from openclip_ext.data.manifest.search import find_or_create_manifest

__all__ = ["DamagedManifestError", "Manifest", "ManifestError", "Shard", "find_or_create_manifest", "main"]
