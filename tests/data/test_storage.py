"""Where bytes come from: files, commands and servers; a transfer that breaks off is an error, never an end."""

import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from openclip_ext.data.shardlist import expand_shards
from openclip_ext.data.storage import open_url, read_url
from tests.data.loading import assert_equal, build
from tests.data.shards import write_shards


class Server(ThreadingHTTPServer):
    """Serves a folder over HTTP.

    Attributes:
        has_ranges: Whether it answers requests for a range, and says how long a file is.
        breaks: How many of the next answers break off in their middle.
        requests: Method, path and range of all requests so far.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.folder = folder
        self.has_ranges = True
        self.breaks = 0
        self.requests: list[tuple[str, str, str | None]] = []
        threading.Thread(target=self.serve_forever, daemon=True).start()

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
        file = server.folder / self.path.lstrip("/")
        if not file.is_file():
            self.send_error(404)
            return
        content, status = file.read_bytes(), 200
        if server.has_ranges and wanted:
            first, _, last = wanted.removeprefix("bytes=").partition("-")
            total, status = len(content), 206
            begin, end = int(first), min(int(last or total - 1), total - 1)
            content = content[begin : end + 1]
        self.send_response(status)
        if server.has_ranges:
            self.send_header("Accept-Ranges", "bytes")
            self.send_header("Content-Length", str(len(content)))
            if status == 206:
                self.send_header("Content-Range", f"bytes {begin}-{end}/{total}")
        self.end_headers()
        if with_content:
            if server.breaks:
                server.breaks -= 1
                content = content[: len(content) // 2]
            self.wfile.write(content)

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    with Server(tmp_path) as running:
        yield running
        running.shutdown()


def test_a_command_that_fails_is_an_error(tmp_path: Path):
    (tmp_path / "a.txt").write_bytes(b"content")
    assert read_url(f"pipe:cat {tmp_path}/a.txt | tr a-z A-Z") == b"CONTENT"
    with pytest.raises(OSError, match="exit status 3: printf half; exit 3"):
        read_url("pipe:printf half; exit 3")
    with open_url("pipe:yes") as endless:
        assert endless.read(4) == b"y\ny\n"


@pytest.mark.parametrize("has_ranges", [True, False])
def test_a_server_is_read_as_a_file(tmp_path: Path, server: Server, has_ranges: bool):
    server.has_ranges = has_ranges
    content = bytes(range(256)) * 100
    (tmp_path / "a.bin").write_bytes(content)
    assert read_url(f"{server.url}/a.bin") == content
    with pytest.raises(OSError, match=r"none\.bin"):
        read_url(f"{server.url}/none.bin")


def test_the_package_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "s3fs", None)
    for url, message in (("s3://bucket/0.tar", "Install s3fs"), ("nothing://0.tar", "Protocol not known: nothing")):
        with pytest.raises(ValueError, match=f"cannot read {url}: {message}"):
            expand_shards(url)


@pytest.mark.parametrize("has_ranges, breaks", [(True, 0), (False, 0), (True, 1), (False, 1)])
@pytest.mark.parametrize("workers", [0, 2])
def test_shards_on_a_server_train_as_local_ones(
    tmp_path: Path, server: Server, workers: int, has_ranges: bool, breaks: int
):
    write_shards(tmp_path / "data", [20, 12])
    (tmp_path / "data" / "sizes.json").write_text('{"00000.tar": 20, "00001.tar": 12}')
    server.has_ranges = has_ranges
    expected = list(build(str(tmp_path / "data" / "*.tar"), workers=workers).iterate(1))
    loader = build(f"{server.url}/data/{{00000..00001}}.tar", workers=workers)
    server.breaks = breaks
    assert_equal(list(loader.iterate(1)), expected)
    assert loader.bad_samples() == {}
