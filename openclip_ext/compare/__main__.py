"""``openclip-ext compare``: see :mod:`openclip_ext.compare`."""

import signal

from openclip_ext.cli import command_line
from openclip_ext.compare.comparison import main

if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    command_line.run(main)
