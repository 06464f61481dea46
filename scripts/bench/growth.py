"""Measure how the costs of a step, the per-sample state, start and resume grow with ranks, samples and shards.

    python -m scripts.bench.growth [ranks samples shards] [--output results.json] [--figure growth.svg]

Times are CPU times of one run. *slope* is the exponent of growth between the two largest sizes: 0 is constant, 1 is linear.
Ranks are simulated: a step runs on tensors without values, as in ``openclip-ext plan``.
"""

import argparse
import math
import resource
import tarfile
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from torch.utils._python_dispatch import TorchDispatchMode

from openclip_ext.data.loader.batches import epoch_order
from openclip_ext.data.loader.config import TrainLoaderConfig
from openclip_ext.data.manifest import Manifest, find_or_create_manifest
from openclip_ext.data.manifest.scan import Shard
from openclip_ext.data.order import Lanes
from openclip_ext.data.shards.shard_source import ShardSource
from openclip_ext.diagnostics.dry_run import dry_run, sent_bytes
from openclip_ext.files.writing import output_path
from openclip_ext.losses import registry
from openclip_ext.state.sharded_table import ShardedTable
from openclip_ext.state.table_files import open_table, restore_table, write_table
from scripts.bench import harness

WIDTH, LOCAL, GLOBAL, SHARD = 512, 64, 65536, 10_000
READ_AHEAD, STEPS = 4096, 20
KEYS = ("jpg", "txt")


class Launches(TorchDispatchMode):
    """A context that counts operations."""

    number = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        self.number += 1
        return func(*args, **(kwargs or {}))


def seconds(action: Callable[[], Any]) -> float:
    """Return the CPU time of an action in seconds, including the processes that the action starts and ends."""
    before = cpu_time()
    action()
    return cpu_time() - before


def cpu_time() -> float:
    both = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in both)


def of_ranks(ranks: int) -> harness.Row:
    """Measure a step of ``fastclip``, first with a constant batch per rank, then with a constant global batch."""
    create = partial(registry.create_loss, "fastclip", embed_dim=WIDTH, num_samples=10**6)
    row: harness.Row = {}
    for title, local in (("local_64", LOCAL), ("global_65536", GLOBAL // ranks)):
        with Launches() as launches:
            run = dry_run(create, local, WIDTH, ranks)
        row |= {f"{title}_launches": launches.number, f"{title}_MiB": sent_bytes(run.exchanged, ranks) / 2**20}
        row[f"{title}_host_ms"] = 1000 / STEPS * seconds(partial(dry_run, create, local, WIDTH, ranks, STEPS))
    return row


def of_samples(samples: int) -> harness.Row:
    """Measure the state of ``fastclip`` on one rank, and the sample order of a worker that reads shards of 10,000 samples."""
    tables: list[ShardedTable] = []

    def create() -> None:
        loss = registry.create_loss("fastclip", embed_dim=8, num_samples=samples)
        tables.extend(module for module in loss.modules() if isinstance(module, ShardedTable))

    row = {"create_s": seconds(create), "state_MB": sum(table.nbytes for table in tables) / 1e6}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "table.npy"
        with path.open("wb") as file:
            row["save_s"] = seconds(lambda: write_table(tables[0], file))
        row["restore_s"] = seconds(lambda: restore_table(tables[0], [open_table(path)]))
    tables.clear()
    source = ShardSource(Manifest([Shard(f"/{number}.tar", SHARD) for number in range(samples // SHARD)]), *KEYS)

    def first_sample(start: int, lanes: Lanes) -> None:
        order = epoch_order(source, 0, 0, lanes, np.empty(0, np.int64))
        next(order.unread(0, start))
        next(order.shuffled(0, start))

    one, many = (Lanes(*sizes, LOCAL, 1, samples, TrainLoaderConfig.shuffle_window) for sizes in ((1, 1), (8, 4)))
    row["start_s"] = seconds(lambda: first_sample(0, one))
    row["resume_s"] = seconds(lambda: first_sample(samples // 2, one))
    row["resume_32_workers_s"] = seconds(lambda: first_sample(samples // 2 // 32, many))
    return row


def of_shards(shards: int) -> harness.Row:
    """Measure how long it takes to create the manifest of local one-sample shards, and to read them."""

    def read() -> None:
        source = ShardSource(find_or_create_manifest(pattern), *KEYS)
        for raw in source.read(np.array_split(np.arange(shards), -(-shards // READ_AHEAD))):
            assert raw.problem is None

    def read_with_tarfile() -> None:
        for path in paths:
            with tarfile.open(path, "r:") as file:
                file.getmembers()

    with tempfile.TemporaryDirectory() as folder:
        paths = [f"{folder}/{number:06}.tar" for number in range(shards)]
        harness.write_shard(Path(paths[0]), {"sample": {"jpg": b"0" * 500, "txt": "a caption"}})
        for path in paths[1:]:
            Path(path).write_bytes(Path(paths[0]).read_bytes())
        pattern = f"{folder}/*.tar"
        row = {"read_s": seconds(lambda: [Path(path).read_bytes() for path in paths])}
        row["tarfile_s"] = seconds(read_with_tarfile)
        row["scan_s"] = seconds(lambda: Manifest.scan(paths, workers=1))
        started = time.perf_counter()
        row["first_start_s"] = seconds(lambda: find_or_create_manifest(pattern))
        row["first_start_wall_s"] = time.perf_counter() - started
        row["start_s"] = seconds(lambda: find_or_create_manifest(pattern))
        row["epoch_s"] = seconds(read) - row["start_s"]
    return row


GROWTH: dict[str, tuple[Callable[[int], harness.Row], tuple[int, ...]]] = {
    "ranks": (of_ranks, (1, 8, 64, 1024)),
    "samples": (of_samples, (10**6, 10**7, 10**8)),
    "shards": (of_shards, (1000, 10_000, 100_000)),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("what", nargs="*", choices=[*GROWTH, "all"], default="all")
    parser.add_argument("--figure", type=output_path, help="draw the tables to an SVG file")


def measure(args: argparse.Namespace) -> dict[str, harness.Table]:
    results: dict[str, harness.Table] = {}
    for what in GROWTH if "all" in args.what else args.what:
        of_size, sizes = GROWTH[what]
        rows = [of_size(size) for size in sizes]
        steps = math.log(sizes[-1] / sizes[-2])
        slope = {name: math.log(rows[-1][name] / rows[-2][name]) / steps for name in rows[-1] if rows[-2][name] > 0}
        results[what] = {**{f"{size:,}": row for size, row in zip(sizes, rows, strict=True)}, "slope": slope}
    if args.figure:
        draw(results, args.figure)
    return results


def draw(results: dict[str, harness.Table], path: Path) -> None:
    """Draw each cost, divided by its first value above 0. The legend shows the slope of each cost."""
    figure = Figure(figsize=(5 * len(results), 4.2), layout="constrained")
    for axes, (what, table) in zip(figure.subplots(1, len(results), squeeze=False)[0], results.items(), strict=True):
        slopes = table["slope"]
        sizes = GROWTH[what][1]
        for name in slopes:
            costs = {size: table[f"{size:,}"][name] for size in sizes if table[f"{size:,}"][name] > 0}
            first = next(iter(costs.values()))
            label = f"{name.replace('_', ' ')}, {slopes[name]:.1f}"
            axes.loglog(list(costs), [cost / first for cost in costs.values()], "o-", label=label)
        axes.loglog(sizes, [size / sizes[0] for size in sizes], color="gray", linestyle=":", label="linear, 1.0")
        axes.set_xlabel(what)
        axes.legend(fontsize=7, title="cost, slope", title_fontsize=7)
        axes.grid(alpha=0.3)
    figure.axes[0].set_ylabel("cost, relative to the smallest size")
    with matplotlib.rc_context({"svg.fonttype": "none"}):
        figure.savefig(path, metadata={"Date": None})


if __name__ == "__main__":
    harness.main(__doc__, add_arguments, measure)
