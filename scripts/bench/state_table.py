"""Per-sample state on the host: look-ups as the data set grows, and checkpoints against a plain copy of the same bytes.

    python scripts/bench/state_table.py [--place file] [--folder DIR] [--output results.json]

Look-ups: a step's prefetch, read and write of a batch of random samples, until the write is done. The sizes take turns,
round after round; the ratio to the smallest one is the median over the rounds. Only the pages of those samples exist.
Checkpoints: a table whose every number was written, against a loop that writes the same bytes from one small buffer, and
against numpy reading them; both readers fill new memory. The files are flushed to the disk, and out of the system's cache
before they are read.
"""

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch
from _report import hardware, write_report
from _turns import Action, peak_mib, seconds, spread

from openclip_ext.state.host_table import chunks
from openclip_ext.state.sharded_table import ShardedTable
from openclip_ext.training.table_files import open_table, restore_table, write_table

SIZES = (10**4, 10**6, 10**8)
_BUFFER = 8 << 20


def make_table(num_samples: int, args: argparse.Namespace) -> ShardedTable:
    return ShardedTable(args.columns, num_samples, "cpu", args.folder if args.place == "file" else None)


# --- look-ups --------------------------------------------------------------------------------------------------------


class Lookups:
    """A table of some size and the batches that are looked up in it."""

    def __init__(self, num_samples: int, args: argparse.Namespace) -> None:
        random = torch.Generator().manual_seed(num_samples)
        self.table = make_table(num_samples, args)
        self.batches = [torch.randint(num_samples, (args.batch_size,), generator=random) for _ in range(args.batches)]
        self.valid = torch.ones(args.batch_size, dtype=torch.bool)

    def seconds(self) -> float:
        """Of one batch, the mean over all."""
        start = time.perf_counter()
        for index in self.batches:
            self.table.prefetch(index)
            self.table.write(index, self.table.read(index).nan_to_num(0.0).add(1.0), self.valid)
        self.table.host.finish()
        return (time.perf_counter() - start) / len(self.batches)


def measure_lookups(args: argparse.Namespace) -> dict[str, dict[str, float]]:
    lookups = {number: Lookups(number, args) for number in SIZES}
    first = {number: item.seconds() for number, item in lookups.items()}
    rounds = [{number: item.seconds() for number, item in lookups.items()} for _ in range(args.rounds)]
    return {
        f"{number:.0e}": {
            "ms": 1000 * statistics.median(seconds[number] for seconds in rounds),
            **spread([seconds[number] / seconds[SIZES[0]] for seconds in rounds]),
            "first_ms": 1000 * first[number],
        }
        for number in SIZES
    }


# --- checkpoints -----------------------------------------------------------------------------------------------------


def measure_checkpoints(args: argparse.Namespace) -> dict[str, dict[str, float]]:
    table = make_table(args.dense, args)
    for start, stop in chunks(args.dense):
        table.set_rows(start, torch.rand(stop - start, args.columns) + 1)
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        ours, plain = Path(folder) / "table.npy", Path(folder) / "plain"
        rows: dict[str, list[dict[str, float]]] = {"write": [], "restore": []}
        for _ in range(args.checkpoint_rounds):
            written = measured(lambda: write_flushed(ours, lambda file: write_table(table, file)))
            size = ours.stat().st_size
            rows["write"].append(compared(written, measured(partial(write_plain, plain, size)), size))
            drop_from_cache(ours)
            drop_from_cache(plain)
            restored = measured(lambda: restore_table(make_table(args.dense, args), [open_table(ours)]))
            rows["restore"].append(compared(restored, measured(lambda: read_plain(plain)), size))
    return {name: summary(found) for name, found in rows.items()}


def measured(action: Action) -> tuple[float, float]:
    """Seconds, and by how many MiB the process's memory grew at its largest."""
    taken: list[float] = []
    growth = peak_mib(lambda: taken.append(seconds(action, "cpu")), "cpu")
    return taken[0], growth


def compared(ours: tuple[float, float], plain: tuple[float, float], size: int) -> dict[str, float]:
    return {"throughput": size / ours[0] / 2**20, "ratio": plain[0] / ours[0], "memory": ours[1], "size": size / 2**20}


def summary(found: list[dict[str, float]]) -> dict[str, float]:
    return {
        "MiB": found[0]["size"],
        "MiB_per_s": statistics.median(row["throughput"] for row in found),
        **spread([row["ratio"] for row in found]),
        "peak_memory_MiB": max(row["memory"] for row in found),
    }


def write_flushed(path: Path, write: Callable) -> None:
    path.unlink(missing_ok=True)
    with open(path, "wb") as file:
        write(file)
        file.flush()
        os.fsync(file.fileno())


def write_plain(path: Path, size: int) -> None:
    buffer = os.urandom(_BUFFER)

    def write(file) -> None:
        for start in range(0, size, _BUFFER):
            file.write(buffer[: min(_BUFFER, size - start)])

    write_flushed(path, write)


def read_plain(path: Path) -> None:
    np.fromfile(path, np.uint8)


def drop_from_cache(path: Path) -> None:
    with open(path, "rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


# --- report ----------------------------------------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--place", choices=["memory", "file"], default="memory", help="where the tables are")
    parser.add_argument("--folder", default=tempfile.gettempdir(), help="on the disk that is measured")
    parser.add_argument("--columns", type=int, default=2, help="numbers of a sample: 2, or 6 for temperatures")
    parser.add_argument("--batch-size", type=int, default=5120)
    parser.add_argument("--batches", type=int, default=20, help="batches in a block")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--dense", type=int, default=64 * 10**6, help="samples of the table that is saved")
    parser.add_argument("--checkpoint-rounds", type=int, default=5)
    parser.add_argument("--output", type=Path, help="write the numbers as JSON")
    args = parser.parse_args()
    print(f"{hardware()}, load {os.getloadavg()[0]:.1f}")
    lookups = measure_lookups(args)
    print(f"{'samples':<10}{'ms':>8}{'ratio':>8}{'min':>8}{'max':>8}{'first ms':>10}")
    for name, row in lookups.items():
        print(
            f"{name:<10}{row['ms']:>8.3f}{row['ratio']:>8.2f}{row['ratio_min']:>8.2f}{row['ratio_max']:>8.2f}"
            f"{row['first_ms']:>10.3f}"
        )
    checkpoints = measure_checkpoints(args)
    print(f"\n{'':<10}{'MiB':>8}{'MiB/s':>8}{'ratio':>8}{'min':>8}{'max':>8}{'peak MiB':>10}")
    for name, row in checkpoints.items():
        print(
            f"{name:<10}{row['MiB']:>8.0f}{row['MiB_per_s']:>8.0f}{row['ratio']:>8.2f}{row['ratio_min']:>8.2f}"
            f"{row['ratio_max']:>8.2f}{row['peak_memory_MiB']:>10.1f}"
        )
    if args.output is not None:
        settings = {name: value for name, value in vars(args).items() if name != "output"}
        results = {"lookups": lookups, "checkpoints": checkpoints}
        baseline = {"lookups": f"{SIZES[0]:.0e} samples", "checkpoints": "a plain write or read of the same bytes"}
        write_report(args.output, settings, results, baseline=baseline)


if __name__ == "__main__":
    main()
