"""Run :mod:`openclip_ext.evaluation.beyond`: ``python -m eval.beyond``."""

from openclip_ext.cli import command_line
from openclip_ext.evaluation.beyond import main

if __name__ == "__main__":
    command_line.run(main)
