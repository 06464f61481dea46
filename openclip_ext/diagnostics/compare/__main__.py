"""``python -m openclip_ext.diagnostics.compare``."""

from openclip_ext.diagnostics import command_line
from openclip_ext.diagnostics.compare.command import main

if __name__ == "__main__":
    command_line.run(main)
