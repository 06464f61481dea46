"""Set the flags of ``--config`` that follow the number of training pairs."""

import sys

from openclip_ext import distributed
from openclip_ext.cli.messages import say
from openclip_ext.data.loader.build import number_of_pairs
from openclip_ext.training.config import TrainingConfig, for_pairs
from openclip_ext.training.recipes import configurations


def resolve(config: TrainingConfig) -> TrainingConfig:
    """Return the configuration with the values for its training data, and print them. Collective: all ranks call it.

    If the data cannot be read, the configuration is unchanged, and the checks of the run report the mistake.
    """
    names = config.flags.get("by_pairs")
    if names is None or config.data is None:
        return config
    try:
        pairs = number_of_pairs(config.data)
    except (ValueError, OSError):
        return config
    config = for_pairs(config, pairs)
    if distributed.is_master():
        values = configurations.words(config.flags, ["loss", *names])
        say(f"--config {config.flags['config']} for {pairs:,} pairs: {values}", sys.stderr)
    return config
