"""Read shards from files, commands, a local web server and a local S3 server.

An interrupted, stalled or incomplete transfer is repeated, and its data are never used for training.
"""

import contextlib
import hashlib
import multiprocessing
import random
import re
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import fsspec
import pytest

from openclip_ext.data import remote, storage
from openclip_ext.data.loader.build import build_eval_loader, build_source
from openclip_ext.data.loader.eval_loader import EvalLoader
from openclip_ext.data.manifest import scan
from openclip_ext.data.manifest.__main__ import main as count_shards
from openclip_ext.data.manifest.manifest import Manifest
from openclip_ext.data.shards.shardlist import expand_shards
from openclip_ext.data.sources.spec import DataSpec
from openclip_ext.data.storage import Storage
from openclip_ext.diagnostics.finished_run import load_run
from tests.data.loading import assert_equal, build, indices, preprocess, rest_of, tokenize
from tests.data.shards import write_shards, write_sizes
from tests.training import runs
from tests.training.programs import wait_until

COUNTS = [20, 12, 9, 3]
SHARDS = "{00000..00003}.tar"


class Server(ThreadingHTTPServer):
    """A local HTTP server that serves the files of a folder, and can simulate faults.

    Attributes:
        has_ranges: whether the server supports range requests and sends the length of a file.
        has_version: whether the server also sends an ETag; only used with ``has_ranges``.
        trickles: whether the server sends content byte by byte, with pauses.
        breaks: how many of the next responses stop after half of the content.
        stalls: how many of the next requests get no response.
        away_until: the server closes connections without a response until this value of ``time.monotonic()``.
        requests: method, path and range of every request.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.folder = folder
        self.has_ranges = self.has_version = True
        self.trickles = False
        self.breaks = self.stalls = 0
        self.away_until = 0.0
        self.requests: list[tuple[str, str, str | None]] = []
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def fetched(self) -> list[str]:
        """Return the paths of all GET requests."""
        return [path for method, path, _ in self.requests if method == "GET"]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Handler(BaseHTTPRequestHandler):
    server: Server

    def do_HEAD(self) -> None:
        self._answer(with_content=False)

    def do_GET(self) -> None:
        self._answer(with_content=True)

    def _answer(self, with_content: bool) -> None:
        server, wanted = self.server, self.headers.get("Range")
        server.requests.append((self.command, self.path, wanted))
        file = server.folder / self.path.partition("?")[0].lstrip("/")
        if not file.is_file():
            self.send_error(404)
            return
        if time.monotonic() < server.away_until:
            return
        if server.stalls:
            server.stalls -= 1
            time.sleep(2)
            return
        content, status = file.read_bytes(), 200
        version = hashlib.md5(content).hexdigest()
        if server.has_ranges and wanted:
            first, _, last = wanted.removeprefix("bytes=").partition("-")
            total, status = len(content), 206
            begin, end = int(first), min(int(last or total - 1), total - 1)
            content = content[begin : end + 1]
        self.send_response(status)
        if server.has_ranges:
            self.send_header("Accept-Ranges", "bytes")
            if server.has_version:
                self.send_header("ETag", f'"{version}"')
            self.send_header("Content-Length", str(len(content)))
            if status == 206:
                self.send_header("Content-Range", f"bytes {begin}-{end}/{total}")
        self.end_headers()
        if with_content:
            if server.breaks:
                server.breaks -= 1
                content = content[: len(content) // 2]
            with contextlib.suppress(ConnectionError):
                for byte in content if server.trickles else ():
                    self.wfile.write(bytes([byte]))
                    time.sleep(0.01)
                self.wfile.write(content)

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder with shards and their ``sizes.json``."""
    write_shards(tmp_path / "data", COUNTS)
    write_sizes(tmp_path / "data", COUNTS)
    return tmp_path / "data"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    with Server(tmp_path) as running:
        yield running
        running.shutdown()


@pytest.fixture
def bucket(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[float], None]]:
    """Start an S3 server with the shards in a bucket; yield a function that stops it for a number of seconds."""
    serve = pytest.importorskip("moto.server").ThreadedMotoServer
    pytest.importorskip("moto.backends").get_backend("s3").reset()  # remove the content of earlier servers
    server = serve("127.0.0.1", 0, verbose=False)
    server.start()
    _, port = server.get_host_and_port()
    for name, value in {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
        "AWS_ACCESS_KEY_ID": "user",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_MAX_ATTEMPTS": "1",  # otherwise botocore's own retries could hide the outage
    }.items():
        monkeypatch.setenv(name, value)
    fsspec.filesystem("s3").clear_instance_cache()  # a cached client has an earlier server's address
    files = fsspec.filesystem("s3")
    files.mkdir("bucket")
    files.put([str(path) for path in folder.glob("*.tar")], "bucket/")

    def go_away(seconds: float) -> None:
        def come_back() -> None:
            nonlocal server
            time.sleep(seconds)
            server = serve("127.0.0.1", port, verbose=False)
            server.start()

        server.stop()
        threading.Thread(target=come_back).start()

    yield go_away
    server.stop()


# ------------------------------------------------------------------ files


def test_a_command_that_fails_is_an_error(tmp_path: Path):
    (tmp_path / "a.txt").write_bytes(b"content")
    at_once = Storage(patience=0)
    assert at_once.read(f"pipe:cat {tmp_path}/a.txt | tr a-z A-Z") == b"CONTENT"
    with pytest.raises(OSError, match="exit status 3: printf half; exit 3"):
        at_once.read("pipe:printf half; exit 3")
    with at_once.open("pipe:yes") as endless:
        assert endless.read(4) == b"y\ny\n"


def test_what_will_not_come_is_not_waited_for(
    server: Server, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    with pytest.raises(OSError, match=r"none\.bin"):
        Storage().read(f"{server.url}/none.bin")
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    for url, message in (("gs://bucket/0.tar", "install gcsfs"), ("nothing://0.tar", "Protocol not known: nothing")):
        with pytest.raises(ValueError, match=f"(?i)cannot read shards: {url}: .*{message}"):
            build(url)
    assert "retry in" not in caplog.text


# ------------------------------------------------------------------ secrets


def test_a_password_is_in_no_file_of_a_run(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture
):
    """The second launch has another password in its URL, and still finds the manifest of the first launch."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    shards = runs.make_shards(tmp_path / "data")
    for number, password in enumerate(("s3cret", "0ther-s3cret")):
        url = server.url.replace("//", f"//user:{password}@") + f"/data/{Path(shards).name}?token={password}"
        logs = tmp_path / "logs"
        assert (
            runs.run(runs.command(url, logs, f"run{number}", "neuclip", "--cache-dir", str(tmp_path / "copies"))) == 0
        )
    files = [path for name in ("logs", "cache", "copies") for path in (tmp_path / name).rglob("*") if path.is_file()]
    assert len(files) > 10 and [path for path in files if b"s3cret" in path.read_bytes() or "s3cret" in str(path)] == []
    assert len(list((tmp_path / "cache").rglob("manifest-*.json"))) == 1
    assert len(list((tmp_path / "copies").glob("*.tar*[!k]"))) == 7
    shown = capfd.readouterr()
    assert "Using the manifest" in shown.err and "s3cret" not in shown.out + shown.err
    with pytest.raises(ValueError, match=r"does not store the secrets in .*: give the full URL with --train-data"):
        load_run(logs / "run0")


# ------------------------------------------------------------------ training


@pytest.mark.parametrize(("way", "workers"), [("ranges", 0), ("ranges", 2), ("stream", 1), ("command", 0)])
def test_shards_elsewhere_train_as_local_ones(folder: Path, server: Server, workers: int, way: str):
    """The server interrupts its first response, so the loader must repeat this request."""
    server.has_ranges = way == "ranges"
    whole = list(build(f"{folder}/{SHARDS}", workers=workers).iterate(1))
    loader = build(
        f"pipe:cat {folder}/{SHARDS}" if way == "command" else f"{server.url}/data/{SHARDS}", workers=workers
    )
    server.breaks = 1
    assert_equal(list(loader.iterate(1)), whole)
    assert_equal(rest_of(loader, 1, 6), whole[6:])
    assert loader.bad.by_shard() == {} and server.breaks == (way == "command")


def test_shards_in_a_bucket_train_as_local_ones(bucket: Any, folder: Path, tmp_path: Path):
    """The error message of the training contains the command that counts the samples. The test runs this command."""
    assert expand_shards("s3://bucket/0000[0-2].tar") == [f"s3://bucket/0000{number}.tar" for number in range(3)]
    with pytest.raises(ValueError, match=r"no file matches 's3://bucket/\*.tgz'"):
        expand_shards("s3://bucket/*.tgz")
    with pytest.raises(ValueError, match=r"cannot read shards: s3://bucked/00000\.tar: .*bucket does not exist"):
        build(f"s3://bucked/{SHARDS}")
    with pytest.raises(ValueError, match="number of samples is unknown for 4 of 4 shards") as refused:
        build(f"s3://bucket/{SHARDS}")
    command = re.search("openclip-ext manifest SHARDS --output manifest.json", str(refused.value))
    assert command and "train with --manifest manifest.json" in str(refused.value)
    # The exception keeps this frame and its loaders, whose garbage collection takes seconds, perhaps in fsspec's thread.
    del refused
    counts = str(tmp_path / "manifest.json")
    assert count_shards([f"s3://bucket/{SHARDS}", "--output", counts]) == 0
    for workers, options in ((0, {}), (2, {}), (2, {"cache_dir": str(tmp_path / "copies")})):
        loader = build(f"s3://bucket/{SHARDS}", manifest=counts, workers=workers, **options)
        expected = list(build(f"{folder}/{SHARDS}", workers=workers).iterate(1))
        assert_equal(list(loader.iterate(1)), expected)
    assert len(list((tmp_path / "copies").glob("*.tar"))) == 4
    assert_equal(list(loader.iterate(1)), expected)


def test_a_bucket_that_is_away_for_a_while(bucket: Any, folder: Path, caplog: pytest.LogCaptureFixture):
    fsspec.filesystem("s3").put(str(folder / "sizes.json"), "bucket/sizes.json")
    loader = build(f"s3://bucket/{SHARDS}")
    expected = list(build(f"{folder}/{SHARDS}").iterate(0))
    started = time.monotonic()
    bucket(3)
    assert_equal(list(loader.iterate(0)), expected)
    assert loader.bad.by_shard() == {} and time.monotonic() - started >= 3
    assert re.search(r"Reading s3://.*/0000\d.tar failed .*retry in", caplog.text)
    assert re.search(r"continues after \d+ failures in \d+ s", caplog.text)


def test_the_waits_of_a_long_outage_do_not_overflow(monkeypatch: pytest.MonkeyPatch):
    """With waits of up to 30 s, 1,100 attempts take nine hours."""

    def read() -> str:
        if next(attempts, None) is not None:
            raise OSError("unavailable")
        return "content"

    monkeypatch.setattr(remote, "_LONGEST_WAIT", 0.0)
    attempts = iter(range(1100))
    assert remote.persist("s3://b/0.tar", 60.0, lambda error: False, read) == "content"


def test_a_connection_that_stalls_has_a_time_limit(folder: Path, server: Server, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(remote, "_STALL", 0.3)
    server.stalls = 2
    assert Storage().read(f"{server.url}/data/00000.tar") == (folder / "00000.tar").read_bytes()
    server.stalls = 10
    with pytest.raises(OSError, match=r"00000.tar: \w*Timeout\w*:.*attempts in"):
        Storage(patience=1.0).read(f"{server.url}/data/00000.tar")
    with pytest.raises(OSError, match=r"wrote nothing for 0\.3 s"):
        Storage(patience=0).read("pipe:sleep 5")


@pytest.mark.parametrize("has_ranges", [True, False])
def test_an_answer_that_trickles_has_a_time_limit(
    has_ranges: bool, folder: Path, server: Server, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(remote, "_STALL", 0.5)
    server.has_ranges, server.trickles = has_ranges, True
    with pytest.raises(
        OSError, match=r"00000.tar: \w*Timeout\w*:" + ("" if has_ranges else r" received only \d+ bytes in")
    ):
        Storage(patience=0).read(f"{server.url}/data/00000.tar")
    with pytest.raises(OSError, match=r"TimeoutError: received only \d+ bytes in 1 s"):
        Storage(patience=0).read("pipe:for i in $(seq 100); do echo; sleep 0.02; done")


def test_a_whole_stream_may_take_longer_than_a_request(folder: Path, server: Server, monkeypatch: pytest.MonkeyPatch):
    """The time limit applies to each wait for bytes. Pauses of the reader and the total time do not count."""
    monkeypatch.setattr(remote, "_STALL", 0.5)
    monkeypatch.setattr(remote, "BUFFER", 1 << 16)
    server.has_ranges = False
    (folder / "large").write_bytes(content := bytes(range(256)) * (1 << 15))
    with Storage(patience=0).open(f"{server.url}/data/large") as file:
        parts, requests = [file.read(1 << 21)], len(server.requests)
        while parts[-1]:
            time.sleep(0.7)
            parts.append(file.read(1 << 21))
    assert b"".join(parts) == content and len(server.requests) == requests


def test_a_wrong_address_is_refused_at_once(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    """An address that never worked is an error at once. An address that worked before would be retried."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE", "AWS_ENDPOINT_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    fsspec.filesystem("s3").clear_instance_cache()
    counts = str(tmp_path / "m.json")
    for url in (f"s3://nowhere/{SHARDS}", f"http://127.0.0.1:9/{SHARDS}", f"http://no.such.host.invalid/{SHARDS}",
                f"pipe:no-such-program {SHARDS}"):  # fmt: skip
        for start in (
            lambda url=url: build(url),
            lambda url=url: build(url, manifest=counts),
            lambda url=url: build_eval_loader(DataSpec(url), preprocess=preprocess, tokenizer=tokenize, batch_size=1),
        ):
            found = Manifest([scan.Shard(shard, 9) for shard in expand_shards(url)])
            found.save(counts)
            with pytest.raises(ValueError, match="cannot read shards: "):
                start()
    with pytest.raises(ValueError, match=r"s3://nowhere/\*.tar: .*[Cc]redentials"):
        expand_shards("s3://nowhere/*.tar")
    assert not re.search("(nowhere|:9/|invalid|program).*retry in", caplog.text)


def test_a_refusal_says_its_reason(server: Server, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(_Handler, "_answer", lambda handler, with_content: handler.send_error(403))
    with pytest.raises(OSError, match="403, message='Forbidden'"):
        Storage(0).open(f"{server.url}/0.tar")


def test_the_proxy_of_the_environment_is_used(server: Server, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("http_proxy", server.url)
    with pytest.raises(OSError, match="404"):
        Storage(0).open("http://no.such.host.invalid/0.tar")
    assert server.requests[0][1] == "http://no.such.host.invalid/0.tar"


def test_a_file_that_is_replaced_while_it_is_read(folder: Path, server: Server, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(remote, "_BLOCK", 4096)
    monkeypatch.setattr(remote, "BUFFER", 4096)
    path = folder / "00000.tar"
    with Storage(patience=0).open(f"{server.url}/data/00000.tar") as file:
        file.read(4096)
        # Replaced at once, because the next block is already read in the background.
        path.with_suffix(".new").write_bytes(path.read_bytes()[::-1])
        path.with_suffix(".new").replace(path)
        with pytest.raises(OSError, match="replaced while it was read"):
            file.read()


def test_the_next_shards_are_fetched_while_this_one_is_read(folder: Path, server: Server):
    batches = build(f"{server.url}/data/{SHARDS}", shuffle_window=0, batch_size=1).iterate(0)
    next(batches)
    wait_until(lambda: len(set(server.fetched()) - {"/data/sizes.json"}) >= 4, 60)


def test_each_shard_is_fetched_once_for_evaluation(folder: Path, server: Server):
    """The commands inspect and estimation-error read the training data with this loader."""
    source = build_source(DataSpec(f"{server.url}/data/{SHARDS}"))
    server.requests.clear()
    loader = EvalLoader(source, preprocess=preprocess, tokenizer=tokenize, batch_size=4, workers=2)
    assert sorted(indices(list(loader))) == list(range(sum(COUNTS)))
    assert sorted(server.fetched()) == [f"/data/0000{number}.tar" for number in range(4)]


# ------------------------------------------------------------------ copies


def test_copies_that_were_not_used_for_longest_are_removed(folder: Path, server: Server, tmp_path: Path):
    size = (folder / "00000.tar").stat().st_size
    for number in range(1, 4):
        shutil.copy(folder / "00000.tar", folder / f"0000{number}.tar")
    kept = Storage(cache_dir=str(tmp_path / "copies"), cache_size=2.5 * size / 2**30)
    first = kept.open(f"{server.url}/data/00000.tar")
    for number in (1, 0, 2):
        kept.open(f"{server.url}/data/0000{number}.tar").close()
    assert sorted(path.name[-9:] for path in (tmp_path / "copies").glob("*.tar")) == ["00000.tar", "00002.tar"]
    kept.open(f"{server.url}/data/00003.tar").close()
    kept.open(f"{server.url}/data/00001.tar").close()
    copies = {path.name for path in (tmp_path / "copies").iterdir()}
    assert {name for name in copies if name.endswith(".lock")} == {
        ".lock",
        *(f"{n}.lock" for n in copies if n.endswith(".tar")),
    }
    assert first.read() == (folder / "00000.tar").read_bytes(), "open files stay readable"
    # The file is replaced, and its transfer is interrupted once: neither the old nor an incomplete copy may be used.
    (folder / "00001.tar").write_bytes(b"other" * 1000)
    server.breaks = 1
    with kept.open(f"{server.url}/data/00001.tar") as file:
        assert file.read() == b"other" * 1000


def read_at_random(seed: int, url: str, folder: str, size: float) -> int:
    kept, generator = Storage(5.0, folder, size), random.Random(seed)
    for _ in range(40):
        with kept.open(f"{url}/data/0000{generator.randrange(4)}.tar") as file:
            assert len(file.read()) > 1000
    return seed


def test_processes_leave_each_others_unfinished_copies_alone(
    folder: Path, server: Server, tmp_path: Path, capfd: pytest.CaptureFixture
):
    """The cache has room for only half a shard, so the processes remove copies all the time."""
    copies, size = tmp_path / "copies", (folder / "00003.tar").stat().st_size / 2**31
    with multiprocessing.get_context("fork").Pool(4) as pool:
        read = partial(read_at_random, url=server.url, folder=str(copies), size=size)
        assert pool.map(read, range(4), chunksize=1) == [0, 1, 2, 3]
    assert list(copies.glob("*.partial")) == [] and "fails" not in capfd.readouterr().err


def test_a_copy_that_cannot_be_written_is_done_without(
    folder: Path, server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(
        storage.os, "utime", lambda *_, **__: (_ for _ in ()).throw(FileNotFoundError(2, "it vanished"))
    )
    with Storage(cache_dir=str(tmp_path / "copies")).open(f"{server.url}/data/00000.tar") as file:
        assert file.read() == (folder / "00000.tar").read_bytes()
    assert re.search("--cache-dir .* fails .*it vanished.*00000.tar is read without a copy", caplog.text)


def test_what_has_no_version_is_not_kept(
    folder: Path, server: Server, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    """Without a version (ETag), a copy could be read even after the file was replaced, so no copy is made."""
    server.has_version = False
    kept = Storage(cache_dir=str(tmp_path / "copies"))
    for url in (f"{server.url}/data/00000.tar", f"pipe:cat {folder}/00000.tar"):
        for content in (b"a" * 2000, b"b" * 2000):
            (folder / "00000.tar").write_bytes(content)
            with kept.open(url) as file:
                assert file.read() == content
    assert not (tmp_path / "copies").exists()
    build(f"{server.url}/data/{SHARDS}", cache_dir=str(tmp_path / "copies"))
    assert "--cache-dir keeps no copy of http" in caplog.text


def test_workers_share_copies_and_need_room_for_what_is_in_use(folder: Path, server: Server, tmp_path: Path):
    size = (folder / "00000.tar").stat().st_size / 2**30
    options = {"cache_dir": str(tmp_path / "copies"), "workers": 2}
    expected = r"--cache-size \S+ GiB is too small for the .* GiB of 4 shards in use \(1 ranks of the node x 2 workers"
    with pytest.raises(ValueError, match=expected):
        build(f"{server.url}/data/{SHARDS}", cache_size=2 * size, **options)
    assert len(list(build(f"{server.url}/data/{SHARDS}", cache_size=2.3 * size, **options).iterate(0))) == 11
    loader = build(f"{server.url}/data/{SHARDS}", workers=2, cache_dir=str(tmp_path / "shared"))
    server.requests.clear()
    assert len(list(loader.iterate(0))) == 11
    assert sorted(server.fetched()) == [f"/data/0000{number}.tar" for number in range(4)]


# ------------------------------------------------------------------ counts


def test_a_journal_is_not_believed_about_a_shard_that_was_replaced(folder: Path, server: Server, tmp_path: Path):
    journal, urls = tmp_path / "journal", expand_shards(f"{server.url}/data/{SHARDS}")

    def counts() -> list[int]:
        server.requests.clear()
        return [shard.num_samples for shard in scan.scan_remote(urls, "jpg", "txt", Storage(), journal).values()]

    assert counts() == COUNTS and server.fetched()
    assert counts() == COUNTS and not server.fetched()
    write_shards(folder, [18])
    assert counts() == [18, *COUNTS[1:]] and set(server.fetched()) == {"/data/00000.tar"}
    server.has_version = False
    assert counts() == [18, *COUNTS[1:]] and len(set(server.fetched())) == 4, "no version: read again"


def test_a_remote_shard_that_was_replaced_after_its_scan(
    folder: Path, server: Server, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    """An index would refer to another sample. A new file with the same members is accepted."""
    (folder / "sizes.json").unlink()
    urls, manifest = f"{server.url}/data/{SHARDS}", str(tmp_path / "m.json")
    assert count_shards([urls, "--output", manifest]) == 0

    def train(**options: Any) -> tuple[list[Any], dict[str, int]]:
        loader = build(urls, manifest=manifest, max_bad_fraction=0.9, **options)
        return list(loader.iterate(0)), loader.bad.by_shard()

    expected, _ = train()
    with (folder / "00000.tar").open("ab") as file:
        file.write(bytes(10240))
    batches, bad = train()
    assert_equal(batches, expected)
    assert not bad and "00000.tar has changed since the manifest was made: it is scanned again" in caplog.text
    shutil.copy(folder / "00001.tar", folder / "00000.tar")
    for options in ({}, {"cache_dir": str(tmp_path / "copies")}):
        assert train(**options)[1] == {f"{server.url}/data/00000.tar": 20}
    assert "was replaced by a file with different samples" in caplog.text
    server.has_version = False
    assert train()[1] == {f"{server.url}/data/00000.tar": 20}
    shutil.copytree(folder, tmp_path / "moved")
    assert Manifest.load(manifest).verify(expand_shards(f"{server.url}/moved/{SHARDS}"))


def test_a_scan_that_was_killed_goes_on(folder: Path, server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (folder / "sizes.json").unlink()
    arguments = [f"{server.url}/data/{SHARDS}", "--output", str(tmp_path / "m.json")]
    scan_shard = scan.scan_shard

    def killed(url: str, **options: object) -> scan.Shard:
        if url.endswith("3.tar"):
            time.sleep(1)
            raise KeyboardInterrupt
        return scan_shard(url, **options)

    monkeypatch.setattr(scan, "scan_shard", killed)
    with pytest.raises(KeyboardInterrupt):
        count_shards(arguments)
    monkeypatch.undo()
    server.requests.clear()
    assert count_shards(arguments) == 0
    assert {path for path in server.fetched() if path.endswith(".tar")} == {"/data/00003.tar"}
    found = Manifest.load(tmp_path / "m.json")
    assert [shard.num_samples for shard in found.shards] == COUNTS
    assert found.digest == Manifest.scan(f"{folder}/{SHARDS}").digest
    assert not list(tmp_path.glob("*.journal"))
