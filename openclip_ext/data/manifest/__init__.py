"""The manifest of a data set: the number of samples in each shard. These numbers define the index of every sample."""

from openclip_ext.data.manifest.find import find_or_create_manifest as find_or_create_manifest
from openclip_ext.data.manifest.manifest import Manifest as Manifest
from openclip_ext.data.manifest.manifest import ManifestError as ManifestError

# Imported here for checks outside this repository, which write manifests.
from openclip_ext.data.manifest.manifest import _checksum as _checksum
