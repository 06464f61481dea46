"""``python -m eval.download``: see :mod:`openclip_ext.evaluation.download`."""

from openclip_ext.cli import command_line
from openclip_ext.evaluation.download import main

if __name__ == "__main__":
    command_line.run(main)
