"""Code shared by all benchmarks: arguments, alternating candidates, ratios to a baseline, tables, and a JSON report."""

import argparse
import io
import json
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
import webdataset
from PIL import Image
from torch.nn.functional import normalize

from openclip_ext import compat
from openclip_ext.files.writing import output_path
from openclip_ext.losses import registry
from openclip_ext.training.runtime.run_folder import versions
from scripts.experiments.grid import environment

Action = Callable[[], object]
Row = dict[str, float]
Table = dict[str, Row]

IMAGE_TEXT_LOSSES = [name for name in registry.list_losses() if registry.options_used_by(name).get("views", 1) == 1]


def main(
    doc: str,
    add_arguments: Callable[[argparse.ArgumentParser], None],
    measure: Callable[[argparse.Namespace], dict[str, Table]],
    **about: Any,
) -> None:
    """Run a benchmark as a program: parse its arguments, measure, print the tables, and write the report.

    Args:
        doc: Docstring of the benchmark. Its first line is the description in ``--help``.
        add_arguments: Function that adds arguments. ``--rounds``, ``--device`` and ``--output`` always exist.
        measure: Function that returns tables by title. A table has a row of numbers for each candidate.
        about: Additional entries of the report, such as the baseline.
    """
    parser = argparse.ArgumentParser(description=doc.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--output", type=output_path, help="JSON file for the numbers")
    add_arguments(parser)
    args = parser.parse_args()
    about |= {"hardware": hardware(args.device), "load": os.getloadavg()[0]}
    print(f"{about['hardware']}, load {about['load']:.1f}", flush=True)
    compat.set_backends()
    results = measure(args)
    for title, table in results.items():
        print(f"\n{title}\n{pd.DataFrame(table).T.round(3).to_string(na_rep='')}")
    if args.output is not None:
        report = {**about, "settings": vars(args), "versions": versions(), "results": results}
        args.output.write_text(json.dumps(report, indent=2, default=str) + "\n")


def add_losses(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--losses", nargs="+", default=IMAGE_TEXT_LOSSES, choices=IMAGE_TEXT_LOSSES, metavar="LOSS")
    parser.add_argument("--prototypes", type=int, default=4096, help="number of prototypes in losses with prototypes")


def create_loss(name: str, args: argparse.Namespace, embed_dim: int, num_samples: int, device: Any) -> torch.nn.Module:
    """Create a loss with the default options, except for the number of prototypes (``--prototypes``)."""
    options = {"prototypes": args.prototypes} if "prototypes" in registry.options_used_by(name) else {}
    return registry.create_loss(name, embed_dim=embed_dim, num_samples=num_samples, **options).to(device)


def unit_features(batch_size: int, embed_dim: int, device: str) -> torch.Tensor:
    """Return random unit features of images and texts, ``(2, B, d)``."""
    random = torch.Generator().manual_seed(0)
    return normalize(torch.randn(2, batch_size, embed_dim, generator=random), dim=2).to(device)


def take_turns(candidates: Mapping[str, Action], baseline: str, args: argparse.Namespace) -> Table:
    """Run all candidates in alternation, after a warm-up round; compare their times in ``ms``."""
    rounds = [
        {name: 1000 * seconds(action, args.device) for name, action in candidates.items()}
        for _ in range(args.rounds + 1)
    ]
    return compare(rounds[1:], baseline, "ms")


def compare(rounds: Sequence[Mapping[str, float]], baseline: str, unit: str = "samples_per_second") -> Table:
    """Compare the measured values of candidates over rounds.

    Returns:
        For each candidate, the median value, and the median, smallest and largest ratio to the baseline in the same round.
    """
    table = {}
    for name in rounds[0]:
        ratios = [found[name] / found[baseline] for found in rounds]
        table[name] = {
            unit: statistics.median(found[name] for found in rounds),
            "ratio": statistics.median(ratios),
            "ratio_min": min(ratios),
            "ratio_max": max(ratios),
        }
    return table


def seconds(action: Action, device: str) -> float:
    """Return the duration of an action in seconds, including its work on the device. With one CPU thread, measure CPU time."""
    sync = torch.cuda.synchronize if device.startswith("cuda") else lambda: None
    # Other programs affect CPU time less than elapsed time.
    clock = time.process_time if device == "cpu" and torch.get_num_threads() == 1 else time.perf_counter
    sync()
    start = clock()
    action()
    sync()
    return clock() - start


def peak_mib(action: Action, device: str) -> float:
    """Return the peak growth in MiB of allocated GPU memory or, on a CPU, of the process's memory (Linux only)."""
    if device.startswith("cuda"):
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        action()
        return (torch.cuda.max_memory_allocated(device) - before) / 2**20
    Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM, the peak of the process's memory
    before = _read_status("VmRSS")
    action()
    return (_read_status("VmHWM") - before) / 2**10


def _read_status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


def photograph(rng: np.random.Generator, width: int, height: int) -> bytes:
    """Return a JPEG of random colors and noise. Its size in bytes is about that of a photograph with equal dimensions."""
    coarse = rng.integers(0, 256, (max(height // 16, 2), max(width // 16, 2), 3), dtype=np.uint8)
    pixels = np.asarray(Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC), dtype=np.int16)
    noisy = (pixels + rng.normal(0, 8, pixels.shape)).clip(0, 255).astype(np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(noisy).save(buffer, "JPEG", quality=90)
    return buffer.getvalue()


def write_shard(path: Path, samples: Mapping[str, Mapping[str, Any]]) -> None:
    """Write a tar of samples. ``samples`` contains the fields of each sample, by key."""
    with webdataset.TarWriter(str(path)) as writer:
        for key, fields in samples.items():
            writer.write({"__key__": key, **fields})


def hardware(device: str) -> str:
    if device.startswith("cuda"):
        return torch.cuda.get_device_name()
    return f"{environment()['cpu']}, {os.cpu_count()} cores, {torch.get_num_threads()} threads"
