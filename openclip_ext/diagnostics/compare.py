"""Run :mod:`openclip_ext.experiments.compare` as ``python -m openclip_ext.diagnostics.compare``."""

import signal

from openclip_ext.diagnostics import command_line
from openclip_ext.experiments.compare.comparison import main

if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    command_line.run(main)
