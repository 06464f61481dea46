"""Build a training run on the meta device, where tensors have no values: for ``openclip-ext doctor`` and ``plan``."""

import argparse
import math
import warnings
from dataclasses import replace

import torch

from openclip_ext.cli.command_line import count
from openclip_ext.model_configs import add_model_configs
from openclip_ext.training.build import build
from openclip_ext.training.checkpoint.finding import Start
from openclip_ext.training.checks import check
from openclip_ext.training.config import Config, RunPlan
from openclip_ext.training.flags import parse
from openclip_ext.training.plan import ONE_PROCESS, plan_run
from openclip_ext.training.trainer import Trainer

META = torch.device("meta")


def run_to_plan(argv: list[str], world_size: int) -> tuple[Config, RunPlan]:
    """Return what the user typed, and the plan of a run with these flags of ``train`` on ``world_size`` ranks.

    Raise UsageError for mistakes that a run finds before it builds anything.
    """
    add_model_configs()
    config = parse(argv)
    run = plan_run(config, ONE_PROCESS | {"world_size": world_size, "distributed": world_size > 1})
    check(run)
    loading = replace(run.loading, rank=0, world_size=world_size)
    return config, replace(run, loading=loading, reporting=replace(run.reporting, destinations=frozenset()))


def build_on_meta(config: Config, run: RunPlan) -> Trainer:
    """Build a run like the training program, but without memory for its tensors, and without files."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # such as PyTorch's warning about more workers than cores of this machine
        return build(config, run, META, None, Start())


def add_machine_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--world-size", type=count, default=1, help="number of GPUs (default: %(default)s)")
    here = torch.cuda.get_device_properties(0).total_memory if torch.cuda.is_available() else 80e9
    help = "memory of a GPU in GB (default: memory of this machine's GPU, or 80 if there is none)"
    parser.add_argument("--gpu-memory", type=_gigabytes, default=here, metavar="GB", help=help)


def _gigabytes(text: str) -> float:
    value = float(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text}: expected a positive number of GB")
    return value * 1e9
