"""Run :mod:`openclip_ext.evaluation.datacomp`: ``python -m eval.datacomp``."""

from openclip_ext.cli import command_line
from openclip_ext.evaluation.datacomp import main

if __name__ == "__main__":
    command_line.run(main)
