"""Run :mod:`openclip_ext.evaluation.report.__main__`: ``python -m eval.report``."""

from openclip_ext.cli import command_line
from openclip_ext.evaluation.report.__main__ import main

if __name__ == "__main__":
    command_line.run(main)
