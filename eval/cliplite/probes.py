"""Run :mod:`openclip_ext.evaluation.cliplite.probes`: ``python -m eval.cliplite.probes``."""

from openclip_ext.cli import command_line
from openclip_ext.evaluation.cliplite.probes import main

if __name__ == "__main__":
    command_line.run(main)
