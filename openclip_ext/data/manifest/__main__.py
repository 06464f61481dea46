"""``python -m openclip_ext.data.manifest``."""

import sys

from openclip_ext.data.manifest.command import main

if __name__ == "__main__":
    sys.exit(main())
