"""Compare our reading speed with webdataset's ``pipe:curl``, from a server 50 ms away, and time the counting of samples.

    python -m scripts.bench.remote [--output results.json]

The server is a separate process on loopback. It answers each request after ``--latency`` seconds and sends up to
``--megabytes`` MB per second on each connection. Samples are read but not decoded. Sample counts are read from files
``*_stats.json`` in img2dataset's format.
"""

import argparse
import contextlib
import json
import multiprocessing
import os
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import webdataset

from openclip_ext.data.manifest.manifest import Manifest
from openclip_ext.data.shards.shard_source import ShardSource
from openclip_ext.data.storage import Storage
from scripts.bench import harness

BASELINE = "pipe:curl"
PIECE = 1 << 18
BATCH = 4096


class Handler(BaseHTTPRequestHandler):
    """Slow server of files and byte ranges. For every file name in the folder ``stats``, it returns the same sample count."""

    protocol_version = "HTTP/1.1"
    folder: Path
    latency: float
    rate: float

    def do_GET(self) -> None:
        time.sleep(self.latency)
        path = self.folder / self.path.lstrip("/")
        if self.path.startswith("/stats/") and self.path.endswith(".json") and "sizes" not in self.path:
            path = self.folder / "stats.json"
        if not path.is_file():
            return self.send_error(404)
        size, wanted = path.stat().st_size, self.headers.get("Range", "bytes=0-")
        first, _, last = wanted.removeprefix("bytes=").partition("-")
        begin, end = int(first), min(int(last or size), size - 1) + 1
        self.send_response(206 if "Range" in self.headers else 200)
        self.send_header("ETag", '"1"')
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("Content-Range", f"bytes {begin}-{end - 1}/{size}")
        self.send_header("Content-Length", str(end - begin))
        self.end_headers()
        if self.command == "HEAD":
            return
        start = time.monotonic()
        with path.open("rb") as file:
            file.seek(begin)
            for sent in range(0, end - begin, PIECE):
                self.wfile.write(file.read(min(PIECE, end - begin - sent)))
                time.sleep(max(0.0, (sent + PIECE) / self.rate - (time.monotonic() - start)))

    do_HEAD = do_GET

    def log_message(self, *args: object) -> None:
        pass


def serve(folder: Path, latency: float, rate: float, address: Any) -> None:
    """Serve a folder until the process is terminated."""
    Handler.folder, Handler.latency, Handler.rate = folder, latency, rate
    ThreadingHTTPServer.request_queue_size = 256
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    address.put(f"http://127.0.0.1:{server.server_address[1]}")
    server.serve_forever()


@contextlib.contextmanager
def server(folder: Path, args: argparse.Namespace) -> Iterator[str]:
    """Serve a folder in a separate process inside the ``with`` block; yield the server's address."""
    context = multiprocessing.get_context("spawn")
    address = context.Queue()
    process = context.Process(target=serve, args=(folder, args.latency, args.megabytes * 1e6, address), daemon=True)
    process.start()
    try:
        yield address.get()
    finally:
        process.terminate()
        process.join()


def read_with_webdataset(manifest: Manifest) -> int:
    """Read all images with webdataset and curl; return their number of bytes."""
    urls = [f"{BASELINE} -s {shard.url}" for shard in manifest.shards]
    return sum(len(sample["jpg"]) for sample in webdataset.WebDataset(urls, shardshuffle=False))


def read(manifest: Manifest, cache_dir: str | None) -> int:
    """Read all images with this package's reader; return their number of bytes."""
    source, count = ShardSource(manifest, "jpg", "txt", storage=Storage(cache_dir=cache_dir)), manifest.num_samples
    return sum(len(raw.fields["jpg"]) for raw in source.read(np.array_split(np.arange(count), -(-count // BATCH))))


def measure(args: argparse.Namespace) -> dict[str, harness.Table]:
    with tempfile.TemporaryDirectory() as temporary:
        os.environ["XDG_CACHE_HOME"] = f"{temporary}/home"
        folder, rng = Path(temporary) / "served", np.random.default_rng(0)
        folder.mkdir()
        image = rng.bytes(args.image_bytes)
        for shard in range(args.shards):
            samples = {f"{shard:04d}{number:05d}": {"jpg": image, "txt": "words"} for number in range(args.samples)}
            harness.write_shard(folder / f"{shard:05d}.tar", samples)
        (folder / "sizes.json").write_text(
            json.dumps({f"{shard:05d}.tar": args.samples for shard in range(args.shards)})
        )
        (folder / "stats.json").write_text(json.dumps({"successes": args.samples}))
        with server(folder, args) as url:
            start = time.perf_counter()
            counted = Manifest.scan(f"{url}/stats/{{000000..{args.counts - 1:06d}}}.tar")
            seconds = time.perf_counter() - start
            assert counted.num_samples == args.counts * args.samples
            manifest = Manifest.scan(f"{url}/{{00000..{args.shards - 1:05d}}}.tar")
            rounds = [read_each_way(manifest, Path(temporary) / f"{number}") for number in range(args.rounds)]
    reading = harness.compare(rounds, BASELINE, "megabytes_per_second")
    counting = {"*_stats.json": {"shards": float(args.counts), "seconds": seconds}}
    return {"reading": reading, "counting": counting}


def read_each_way(manifest: Manifest, cache: Path) -> dict[str, float]:
    """Return the speed of each way of reading in megabytes per second."""
    ways = {
        BASELINE: partial(read_with_webdataset, manifest),
        "streamed": partial(read, manifest, None),
        "into --cache-dir": partial(read, manifest, str(cache)),
        "from --cache-dir": partial(read, manifest, str(cache)),
    }
    speeds = {}
    for name, way in ways.items():
        start = time.perf_counter()
        speeds[name] = way() / 1e6 / (time.perf_counter() - start)
    return speeds


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--shards", type=int, default=8)
    parser.add_argument("--samples", type=int, default=1000, help="samples per shard")
    parser.add_argument("--image-bytes", type=int, default=20_000)
    parser.add_argument("--latency", type=float, default=0.05, help="seconds before each answer")
    parser.add_argument("--megabytes", type=float, default=50, help="MB per second on each connection")
    parser.add_argument("--counts", type=int, default=100_000, help="number of shards to count")


if __name__ == "__main__":
    harness.main(__doc__, add_arguments, measure, baseline="webdataset over pipe:curl")
