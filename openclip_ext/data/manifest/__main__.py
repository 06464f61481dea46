"""``openclip-ext manifest``: see :mod:`openclip_ext.data.manifest.manifest`."""

import sys

from openclip_ext.data.manifest.manifest import main

if __name__ == "__main__":
    sys.exit(main())
