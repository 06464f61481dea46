"""Parse training flags as the training program does."""

from openclip_ext.training.config import RunPlan
from openclip_ext.training.flags import parse
from openclip_ext.training.plan import ONE_PROCESS, resolve


def plan_of(*argv: str, data: str = "x.tar", **processes: int) -> RunPlan:
    """Return the plan that a process derives from these flags."""
    return resolve(parse(["--train-data", data, *argv]), ONE_PROCESS | processes, "today")
