"""A fake Hugging Face hub on localhost: it serves folders as data set repositories, and can simulate faults."""

import hashlib
import json
import re
import threading
from collections import Counter
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

REVISION = "0123456789abcdef0123456789abcdef01234567"


class FakeHub:
    """A server for the folders in ``repositories[owner/name]``. It lists .tar and .zip files with a SHA-256, as LFS files.

    Attributes:
        endpoint: address of the hub.
        corrupt: file path -> number of next responses with a wrong first byte.
        busy: file path -> number of next responses with status 503.
        requests: path of every file request.
    """

    def __init__(self) -> None:
        self.repositories: dict[str, Path] = {}
        self.corrupt: Counter[str] = Counter()
        self.busy: Counter[str] = Counter()
        self.requests: list[str] = []
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                hub.answer(self)

            do_HEAD = do_GET

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.endpoint = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> "FakeHub":
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def answer(self, handler: BaseHTTPRequestHandler) -> None:
        path = handler.path.split("?")[0]
        if match := re.fullmatch(r"/api/datasets/([^/]+/[^/]+)(/revision/\w+)?", path):
            return self._list(handler, match[1])
        if match := re.fullmatch(r"/api/datasets/([^/]+/[^/]+)/tree/\w+", path):
            return self._list_tree(handler, match[1])
        if match := re.fullmatch(r"/datasets/([^/]+/[^/]+)/resolve/\w+/(.+)", path):
            return self._send_file(handler, self.repositories[match[1]], match[2])
        return self._reply(handler, 404, b"")

    def _list(self, handler: BaseHTTPRequestHandler, repository: str) -> None:
        if repository not in self.repositories:
            return self._reply(handler, 401, b"", {"X-Error-Message": "not found", "X-Error-Code": "RepoNotFound"})
        folder = self.repositories[repository]
        files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
        siblings = [{"rfilename": path.relative_to(folder).as_posix(), "size": path.stat().st_size} for path in files]
        return self._reply(handler, 200, json.dumps({"id": repository, "sha": REVISION, "siblings": siblings}).encode())

    def _list_tree(self, handler: BaseHTTPRequestHandler, repository: str) -> None:
        folder = self.repositories[repository]
        files = [describe(folder, path) for path in sorted(folder.rglob("*")) if path.is_file()]
        self._reply(handler, 200, json.dumps(files).encode())

    def _send_file(self, handler: BaseHTTPRequestHandler, folder: Path, name: str) -> None:
        file = describe(folder, folder / name)
        etag = file.get("lfs", file)["oid"]
        headers = {"ETag": f'"{etag}"', "X-Repo-Commit": REVISION}
        if handler.command == "HEAD":
            return self._reply(handler, 200, b"", {**headers, "Content-Length": str(file["size"])})
        self.requests.append(name)
        if self.busy[name]:
            self.busy[name] -= 1
            return self._reply(handler, 503, b"")
        content = (folder / name).read_bytes()
        if self.corrupt[name]:
            self.corrupt[name] -= 1
            content = bytes([content[0] ^ 1]) + content[1:]
        return self._reply(handler, 200, content, headers)

    def _reply(
        self, handler: BaseHTTPRequestHandler, status: int, body: bytes, headers: Mapping[str, str] | None = None
    ) -> None:
        handler.send_response(status)
        for header, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            handler.send_header(header, value)
        handler.end_headers()
        handler.wfile.write(body)


def describe(folder: Path, path: Path) -> dict:
    """Return a file's entry as the hub's API lists it in a repository tree."""
    content = path.read_bytes()
    git_hash = hashlib.sha1(f"blob {len(content)}\0".encode() + content).hexdigest()
    entry = {"type": "file", "path": path.relative_to(folder).as_posix(), "size": len(content), "oid": git_hash}
    if path.suffix in (".tar", ".zip"):
        entry["lfs"] = {"oid": hashlib.sha256(content).hexdigest(), "size": len(content), "pointerSize": 130}
    return entry
