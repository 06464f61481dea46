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
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

import harness
import numpy as np
import torch

from openclip_ext.state.host_table import chunks
from openclip_ext.state.sharded_table import ShardedTable
from openclip_ext.training.table_files import open_table, restore_table, write_table

SIZES = (10**4, 10**6, 10**8)
BUFFER = 8 << 20


def make_table(num_samples: int, args: argparse.Namespace) -> ShardedTable:
    return ShardedTable(args.columns, num_samples, "cpu", args.folder if args.place == "file" else None)


def make_lookups(num_samples: int, args: argparse.Namespace) -> harness.Action:
    """Return what looks up all batches in a table of some size."""
    random = torch.Generator().manual_seed(num_samples)
    table = make_table(num_samples, args)
    batches = [torch.randint(num_samples, (args.batch_size,), generator=random) for _ in range(args.batches)]
    valid = torch.ones(args.batch_size, dtype=torch.bool)

    def look_up() -> None:
        for index in batches:
            table.prefetch(index)
            table.write(index, table.read(index).nan_to_num(0.0).add(1.0), valid)
        table.host.finish()

    return look_up


def measure_lookups(args: argparse.Namespace) -> harness.Table:
    """Measure the time of a batch; ``first_ms`` is that of batches whose pages are new."""
    lookups = {f"{number:.0e}": make_lookups(number, args) for number in SIZES}
    first = {name: harness.seconds(look_up, "cpu") for name, look_up in lookups.items()}
    results = harness.take_turns(lookups, f"{SIZES[0]:.0e}", args)
    for name, row in results.items():
        row["ms"] /= args.batches
        row["first_ms"] = 1000 * first[name] / args.batches
    return results


def measure_checkpoints(args: argparse.Namespace) -> harness.Table:
    """Measure saving and restoring; the ratio is that of the plain way's time to ours."""
    table = make_table(args.dense, args)
    for start, stop in chunks(args.dense):
        table.set_rows(start, torch.rand(stop - start, args.columns) + 1)
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        ours, plain = Path(folder) / "table.npy", Path(folder) / "plain"
        write_flushed(ours, lambda file: write_table(table, file))
        size = ours.stat().st_size

        def write_plain(file: BinaryIO) -> None:
            buffer = os.urandom(BUFFER)
            for start in range(0, size, BUFFER):
                file.write(buffer[: min(BUFFER, size - start)])

        ways: dict[str, tuple[harness.Action, harness.Action]] = {
            "write": (
                lambda: write_flushed(ours, lambda file: write_table(table, file)),
                lambda: write_flushed(plain, write_plain),
            ),
            "restore": (
                lambda: restore_table(make_table(args.dense, args), [open_table(ours)]),
                lambda: np.fromfile(plain, np.uint8),
            ),
        }
        results = {}
        for name, actions in ways.items():
            rounds, growth = [], 0.0
            for _ in range(args.checkpoint_rounds):
                for file in filter(Path.exists, (ours, plain)):
                    drop_from_cache(file)
                times: list[float] = []
                for action in actions:
                    grown = harness.peak_mib(lambda a=action, t=times: t.append(harness.seconds(a, "cpu")), "cpu")
                    growth = max(growth, grown) if action is actions[0] else growth
                rounds.append({"ours": size / times[0] / 2**20, "plain": size / times[1] / 2**20})
            found = harness.speeds(rounds, "plain")["ours"]
            speed = {"MiB": size / 2**20, "MiB_per_s": found.pop("samples_per_second")}
            results[name] = {**speed, **found, "peak_memory_MiB": growth}
    return results


def write_flushed(path: Path, write: Callable[[BinaryIO], object]) -> None:
    path.unlink(missing_ok=True)
    with open(path, "wb") as file:
        write(file)
        file.flush()
        os.fsync(file.fileno())


def drop_from_cache(path: Path) -> None:
    with open(path, "rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def measure(args: argparse.Namespace) -> dict[str, harness.Table]:
    return {"lookups": measure_lookups(args), "checkpoints": measure_checkpoints(args)}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--place", choices=["memory", "file"], default="memory", help="where the tables are")
    parser.add_argument("--folder", default=tempfile.gettempdir(), help="on the disk that is measured")
    parser.add_argument("--columns", type=int, default=2, help="numbers of a sample: 2, or 6 for temperatures")
    parser.add_argument("--batch-size", type=int, default=5120)
    parser.add_argument("--batches", type=int, default=20, help="batches in a block")
    parser.add_argument("--dense", type=int, default=64 * 10**6, help="samples of the table that is saved")
    parser.add_argument("--checkpoint-rounds", type=int, default=5)


if __name__ == "__main__":
    baseline = {"lookups": f"{SIZES[0]:.0e} samples", "checkpoints": "a plain write or read of the same bytes"}
    harness.main(__doc__, add_arguments, measure, baseline=baseline)
