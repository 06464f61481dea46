"""A fake Hugging Face hub on localhost: it serves folders as data set repositories, and can simulate faults."""

import hashlib
import json
import re
import threading
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

REVISION = "0123456789abcdef0123456789abcdef01234567"
# Status, headers and content of a response.
Answer = tuple[int, dict[str, str], bytes]


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        status, headers, content = self.server.answer(self.path.partition("?")[0], is_get=self.command == "GET")
        self.send_response(status)
        for header, value in {**headers, "Content-Length": str(len(content))}.items():
            self.send_header(header, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)

    do_HEAD = do_GET

    def log_message(self, *_: object) -> None:
        pass


class FakeHub(ThreadingHTTPServer):
    """A server for the folders in ``repositories[owner/name]``. It lists .tar and .zip files with a SHA-256, as LFS files.

    Attributes:
        endpoint: address of the hub.
        corrupt: file path -> number of next responses with a wrong first byte.
        busy: file path -> number of next responses with status 503.
        requests: path of every file request.
    """

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.endpoint = f"http://127.0.0.1:{self.server_port}"
        self.repositories: dict[str, Path] = {}
        self.corrupt: Counter[str] = Counter()
        self.busy: Counter[str] = Counter()
        self.requests: list[str] = []

    def __enter__(self) -> "FakeHub":
        threading.Thread(target=self.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()
        self.server_close()

    def answer(self, path: str, is_get: bool) -> Answer:
        if match := re.fullmatch(r"/api/datasets/([^/]+/[^/]+)(/revision/\w+|/tree/\w+)?", path):
            if match[1] not in self.repositories:
                return 401, {"X-Error-Message": "not found", "X-Error-Code": "RepoNotFound"}, b""
            folder = self.repositories[match[1]]
            files = [describe(folder, file) for file in sorted(folder.rglob("*")) if file.is_file()]
            siblings = [{"rfilename": file["path"], "size": file["size"]} for file in files]
            info = {"id": match[1], "sha": REVISION, "siblings": siblings}
            return 200, {}, json.dumps(files if "/tree/" in path else info).encode()
        if match := re.fullmatch(r"/datasets/([^/]+/[^/]+)/resolve/\w+/(.+)", path):
            return self._file(self.repositories[match[1]], match[2], is_get)
        return 404, {}, b""

    def _file(self, folder: Path, name: str, is_get: bool) -> Answer:
        file, content = describe(folder, folder / name), (folder / name).read_bytes()
        if is_get:
            self.requests.append(name)
            if self.busy[name]:
                self.busy[name] -= 1
                return 503, {}, b""
            if self.corrupt[name]:
                self.corrupt[name] -= 1
                content = bytes([content[0] ^ 1]) + content[1:]
        etag = file.get("lfs", file)["oid"]
        return 200, {"ETag": f'"{etag}"', "X-Repo-Commit": REVISION}, content


def describe(folder: Path, path: Path) -> dict:
    """Return a file's entry as the hub's API lists it in a repository tree."""
    content = path.read_bytes()
    git_hash = hashlib.sha1(f"blob {len(content)}\0".encode() + content).hexdigest()
    entry = {"type": "file", "path": path.relative_to(folder).as_posix(), "size": len(content), "oid": git_hash}
    if path.suffix in (".tar", ".zip"):
        entry["lfs"] = {"oid": hashlib.sha256(content).hexdigest(), "size": len(content), "pointerSize": 130}
    return entry
