"""What the benchmarks share: arguments, contestants that take turns, ratios to a baseline, tables, and a JSON report."""

import argparse
import io
import json
import os
import platform
import statistics
import sys
import tarfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from openclip_ext import compat
from openclip_ext.losses import registry
from openclip_ext.training.run_folder import versions

Action = Callable[[], object]
Row = dict[str, float]
Table = dict[str, Row]

# The losses of images with texts.
IMAGE_TEXT_LOSSES = [name for name in registry.list_losses() if registry.options_used_by(name).get("views", 1) == 1]


def main(
    doc: str,
    add_arguments: Callable[[argparse.ArgumentParser], None],
    measure: Callable[[argparse.Namespace], Table | dict[str, Table]],
    **about: Any,
) -> None:
    """Run a benchmark as a program: read its arguments, measure, print one table or several, and write the report.

    Args:
        doc: of the benchmark; its first line is the description of the command line.
        add_arguments: those of its own, beside ``--rounds``, ``--device``, ``--cpu-time`` and ``--output``.
        measure: returns a row of numbers for each contestant, or such a table for each title.
        about: what else the report says, such as the baseline.
    """
    parser = argparse.ArgumentParser(description=doc.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--cpu-time", action="store_true", help="processor time instead of wall-clock time")
    parser.add_argument("--output", type=Path, help="write the numbers as JSON")
    add_arguments(parser)
    args = parser.parse_args()
    if os.environ.get("RANK", "0") != "0":  # the other ranks measure, and say nothing
        sys.stdout, args.output = io.StringIO(), None
    load = os.getloadavg()[0]
    print(f"{hardware(args.device)}, load {load:.1f}", flush=True)
    compat.set_backends()
    results = measure(args)
    is_one_table = all(isinstance(number, int | float) for row in results.values() for number in row.values())
    for title, table in {"": results}.items() if is_one_table else results.items():
        print_table(title, table)
    if args.output is not None:
        settings = {name: value for name, value in vars(args).items() if name != "output"}
        report = {
            **about,
            "settings": {name: value if _is_plain(value) else str(value) for name, value in settings.items()},
            "hardware": hardware(args.device),
            "load": load,
            "versions": versions(),
            "results": results,
        }
        args.output.write_text(json.dumps(report, indent=2) + "\n")


def add_losses(parser: argparse.ArgumentParser, prototypes: int) -> None:
    """Add the arguments that say which losses are compared."""
    parser.add_argument("--losses", nargs="+", default=IMAGE_TEXT_LOSSES, choices=IMAGE_TEXT_LOSSES, metavar="LOSS")
    parser.add_argument("--prototypes", type=int, default=prototypes, help="of the losses that have them")


def create_loss(name: str, args: argparse.Namespace, embed_dim: int, num_samples: int, device: Any) -> torch.nn.Module:
    """Create a loss with its default options, but for ``--prototypes``."""
    options = {"prototypes": args.prototypes} if "prototypes" in registry.options_used_by(name) else {}
    return registry.create_loss(name, embed_dim=embed_dim, num_samples=num_samples, **options).to(device)


# --- measuring -------------------------------------------------------------------------------------------------------


def take_turns(contestants: Mapping[str, Action], baseline: str, args: argparse.Namespace) -> Table:
    """Run all contestants round after round, after one round of warm-up.

    Returns:
        For each: ``ms``, the median, and its time over the baseline's in the same round.
    """
    rounds = [{name: seconds(action, args) for name, action in contestants.items()} for _ in range(args.rounds + 1)]
    ratios = compared(rounds[1:], baseline)
    return {
        name: {"ms": 1000 * statistics.median(times[name] for times in rounds[1:]), **ratios[name]}
        for name in contestants
    }


def seconds(action: Action, args: argparse.Namespace) -> float:
    """Return the time of an action, the device's work included."""
    clock = time.process_time if args.cpu_time else time.perf_counter
    synchronize(args.device)
    start = clock()
    action()
    synchronize(args.device)
    return clock() - start


def synchronize(device: str) -> None:
    """Wait for the work of a GPU."""
    if device.startswith("cuda"):
        torch.cuda.synchronize(device)


def compared(rounds: Sequence[Mapping[Any, float]], baseline: Any) -> dict[Any, Row]:
    """Return the median, least and largest ratio to the baseline, which saw the same machine in the same round."""
    return {name: spread([found[name] / found[baseline] for found in rounds]) for name in rounds[0]}


def spread(ratios: Sequence[float]) -> Row:
    """Return the median, least and largest of some ratios."""
    return {"ratio": statistics.median(ratios), "ratio_min": min(ratios), "ratio_max": max(ratios)}


def peak_mib(action: Action, device: str) -> float:
    """Return by how much memory grows at its largest: the GPU's allocations, or the process's (Linux only)."""
    if device.startswith("cuda"):
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        action()
        return (torch.cuda.max_memory_allocated(device) - before) / 2**20
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark begins anew
    before = _resident_kib("VmRSS")
    action()
    return (_resident_kib("VmHWM") - before) / 2**10


def _resident_kib(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


# --- data ------------------------------------------------------------------------------------------------------------


def photograph(rng: np.random.Generator, width: int, height: int) -> bytes:
    """Return a JPEG as large as a photograph of its size: coarse structure with some noise."""
    coarse = rng.integers(0, 256, (max(height // 16, 2), max(width // 16, 2), 3), dtype=np.uint8)
    pixels = np.asarray(Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC), dtype=np.int16)
    noisy = (pixels + rng.normal(0, 8, pixels.shape)).clip(0, 255).astype(np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(noisy).save(buffer, "JPEG", quality=90)
    return buffer.getvalue()


def write_shard(path: Path, samples: Mapping[str, Mapping[str, bytes]]) -> None:
    """Write the fields of samples by their keys as a tar."""
    with tarfile.open(path, "w") as archive:
        for key, fields in samples.items():
            for name, content in fields.items():
                member = tarfile.TarInfo(f"{key}.{name}")
                member.size = len(content)
                archive.addfile(member, io.BytesIO(content))


# --- reporting -------------------------------------------------------------------------------------------------------


def print_table(title: str, table: Table) -> None:
    """Print a row for each contestant."""
    columns = list(dict.fromkeys(column for row in table.values() for column in row))
    width = max(map(len, [title, *table])) + 2
    print(f"\n{title:<{width}}" + "".join(f"{column:>{max(10, len(column) + 2)}}" for column in columns))
    for name, row in table.items():
        cells = ((column, f"{row[column]:.3f}".rstrip("0").rstrip(".") if column in row else "") for column in columns)
        print(f"{name:<{width}}" + "".join(f"{cell:>{max(10, len(column) + 2)}}" for column, cell in cells))


def hardware(device: str) -> str:
    """Return the processor or GPU in words."""
    if device.startswith("cuda"):
        return torch.cuda.get_device_name()
    return f"{_processor()}, {os.cpu_count()} cores, {torch.get_num_threads()} threads"


def _processor() -> str:
    """Return its name; on Linux Python knows the architecture only."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, str | int | float | bool | list)
