"""``--profile STEPS``: trace some optimizer steps with PyTorch's profiler."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, schedule

from openclip_ext import distributed

# Numbers of first steps that are not traced. These include compilation, caching and the loss's checks of the training loop.
_FIRST, _WARM_UP = 10, 2


@contextmanager
def profiled(steps: int, folder: Path | None) -> Iterator[Callable[[], None]]:
    """Trace ``steps`` steps of rank 0 after the first 12. Yield a function to call after each step.

    Write ``trace.json.gz`` (for chrome://tracing or Perfetto) and ``table.txt`` (the slowest operations) to
    ``folder/profile/``. Nothing is traced if ``steps`` is 0 or ``folder`` is None.
    """
    if not steps or folder is None or not distributed.is_master():
        yield lambda: None
        return
    target = folder / "profile"

    def write(trace: profile) -> None:
        target.mkdir(exist_ok=True)
        trace.export_chrome_trace(str(target / "trace.json.gz"))
        order = "self_device_time_total" if torch.cuda.is_initialized() else "self_cpu_time_total"
        (target / "table.txt").write_text(trace.key_averages().table(sort_by=order, row_limit=40))
        logging.info(f"Traced {steps} steps: {target}")

    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_initialized() else [])]
    when = schedule(wait=_FIRST, warmup=_WARM_UP, active=steps, repeat=1)
    with profile(activities=activities, schedule=when, on_trace_ready=write) as running:
        yield running.step
    if not (target / "table.txt").exists():
        logging.warning(f"--profile {steps}: no trace, because the run ended before step {_FIRST + _WARM_UP + steps}")
