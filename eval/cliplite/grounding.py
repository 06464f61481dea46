"""Run :mod:`openclip_ext.evaluation.cliplite.grounding`: ``python -m eval.cliplite.grounding``."""

from openclip_ext.cli import command_line
from openclip_ext.evaluation.cliplite.grounding import main

if __name__ == "__main__":
    command_line.run(main)
