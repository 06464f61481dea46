"""What every benchmark says about where its numbers come from."""

import json
import os
import platform
from pathlib import Path
from typing import Any

import torch

from openclip_ext.training.run_folder import versions


def hardware(device: str = "cpu") -> str:
    """The processor or GPU in words."""
    if device.startswith("cuda"):
        return torch.cuda.get_device_name()
    return f"{_processor()}, {os.cpu_count()} cores, {torch.get_num_threads()} threads"


def write_report(path: Path, settings: dict[str, Any], results: Any, device: str = "cpu", **more: Any) -> None:
    """Write a benchmark's numbers as JSON, with hardware, load and versions."""
    report = {
        **more,
        "settings": {name: value if _is_plain(value) else str(value) for name, value in settings.items()},
        "hardware": hardware(device),
        "load": os.getloadavg()[0],
        "versions": versions(),
        "results": results,
    }
    path.write_text(json.dumps(report, indent=2) + "\n")


def _processor() -> str:
    """Its name; on Linux Python knows the architecture only."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, str | int | float | bool | list)
