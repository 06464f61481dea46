"""Parse training flags as the training program does."""

from openclip_ext.training.config import TrainingConfig, for_processes
from openclip_ext.training.flags import parse
from openclip_ext.training.model import with_loss_options


def config_of(*argv: str, data: str = "x.tar", world_size: int = 1) -> TrainingConfig:
    """Return the training configuration that rank 0 builds from these flags."""
    return with_loss_options(for_processes(parse(["--train-data", data, *argv]), "today", world_size=world_size))
