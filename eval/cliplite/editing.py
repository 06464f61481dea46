"""Run :mod:`openclip_ext.evaluation.cliplite.editing`: ``python -m eval.cliplite.editing``."""

from openclip_ext.cli import command_line
from openclip_ext.evaluation.cliplite.editing import main

if __name__ == "__main__":
    command_line.run(main)
