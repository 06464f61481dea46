"""The manifest of a data set of shards: the number of samples in each, and so the index of every sample."""

from openclip_ext.data.manifest.find import find_or_create_manifest as find_or_create_manifest
from openclip_ext.data.manifest.manifest import Manifest as Manifest
from openclip_ext.data.manifest.manifest import ManifestError as ManifestError

# Checks outside of the repository write manifests with it.
from openclip_ext.data.manifest.manifest import _checksum as _checksum
