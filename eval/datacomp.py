"""Run :mod:`openclip_ext.evaluation.datacomp`: ``python -m eval.datacomp``."""

import sys

from openclip_ext.evaluation.datacomp import main

if __name__ == "__main__":
    sys.exit(main())
