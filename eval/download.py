"""Run :mod:`openclip_ext.evaluation.download`: ``python -m eval.download``."""

from openclip_ext.cli import command_line
from openclip_ext.evaluation.download import main

if __name__ == "__main__":
    command_line.run(main)
