"""Contestants that take turns, so that a ratio compares two that saw the same machine."""

import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch

Action = Callable[[], object]
# With --cpu-time, and without.
CLOCKS = {True: time.process_time, False: time.perf_counter}


def take_turns(
    contestants: dict[str, Action],
    baseline: str,
    rounds: int,
    device: str,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, dict[str, float]]:
    """Run all contestants round after round, after one round of warm-up.

    Args:
        clock: in seconds; ``time.process_time`` where other work disturbs.

    Returns:
        For each: ``ms``, the median, and the median, least and largest over the rounds of its time over the baseline's.
    """
    for action in contestants.values():
        seconds(action, device, clock)
    found = [{name: seconds(action, device, clock) for name, action in contestants.items()} for _ in range(rounds)]
    return {
        name: {
            "ms": 1000 * statistics.median(times[name] for times in found),
            **spread([times[name] / times[baseline] for times in found]),
        }
        for name in contestants
    }


def seconds(action: Action, device: str, clock: Callable[[], float] = time.perf_counter) -> float:
    """Time of an action, the device's work included."""
    synchronise(device)
    start = clock()
    action()
    synchronise(device)
    return clock() - start


def synchronise(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize(device)


def spread(ratios: list[float]) -> dict[str, float]:
    return {"ratio": statistics.median(ratios), "ratio_min": min(ratios), "ratio_max": max(ratios)}


def peak_mib(action: Action, device: str) -> float:
    """By how much an action's memory grows at its largest: the GPU's allocations, or the process's (Linux only)."""
    if device.startswith("cuda"):
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        action()
        return (torch.cuda.max_memory_allocated(device) - before) / 2**20
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark begins anew
    before = _resident("VmRSS")
    action()
    return (_resident("VmHWM") - before) / 2**10


def _resident(name: str) -> int:
    """KiB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


def print_turns(results: dict[str, dict[str, float]]) -> None:
    """A row for each contestant."""
    width = max(map(len, results)) + 2
    print(f"{'':<{width}}{'ms':>10}{'ratio':>8}{'min':>8}{'max':>8}" + _memory_title(results))
    for name, row in results.items():
        line = f"{name:<{width}}{row['ms']:>10.2f}{row['ratio']:>8.3f}{row['ratio_min']:>8.3f}{row['ratio_max']:>8.3f}"
        print(line + (f"{row['peak_mib']:>10.1f}" if "peak_mib" in row else ""))


def _memory_title(results: dict[str, dict[str, float]]) -> str:
    return f"{'peak MiB':>10}" if any("peak_mib" in row for row in results.values()) else ""
