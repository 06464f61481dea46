"""Run :mod:`openclip_ext.evaluation.shapes`: ``python -m eval.shapes``."""

from openclip_ext.cli import command_line
from openclip_ext.evaluation.shapes import main

if __name__ == "__main__":
    command_line.run(main)
