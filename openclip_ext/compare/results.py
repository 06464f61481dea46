"""Keep the results of finished runs: a file with one JSON line for each run, written by one program at a time."""

import fcntl
import json
from pathlib import Path
from typing import Any

from openclip_ext.files import json_lines


def read_results(path: Path) -> dict[str, dict[str, Any]]:
    """Return the rows of a file by id, without an incomplete last line; no rows if there is no file."""
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True) if path.exists() else []
    rows: dict[str, dict[str, Any]] = {}
    for number, line in enumerate(lines, start=1):
        if not line.endswith("\n"):
            break
        try:
            row = json.loads(line)
            rows[row["id"]] = row
        except (json.JSONDecodeError, KeyError, TypeError):
            raise ValueError(f"{path}, line {number}: not the result of a run; remove the line or the file") from None
    return rows


class ResultsFile:
    """Appends the rows of finished runs to a file.

    Rows in ``failed`` are not written, so the next call tries these runs again.

    Raises:
        ValueError: another process has the file open, or a line is not a row.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"another process is writing to {path}: wait for it, or choose another place") from None
        self._file.truncate(path.read_bytes().rfind(b"\n") + 1)  # drops an incomplete last line
        self.rows = read_results(path)
        self.failed: dict[str, dict[str, Any]] = {}

    @property
    def known(self) -> dict[str, dict[str, Any]]:
        """Return the rows of the runs that have ended, well or not."""
        return {**self.rows, **self.failed}

    def keep(self, name: str, row: dict[str, Any] | None, failure: str = "") -> dict[str, Any]:
        """Append the row of a run that has ended, or note its failure; return the row."""
        if row is None:
            self.failed[name] = {"id": name, "val": {"mean": -1.0}, "failed": failure}
            return self.failed[name]
        self.rows[name] = row
        self._file.write(json_lines.dumps(row) + "\n")
        self._file.flush()
        return row

    def close(self) -> None:
        """Close the file, so that other programs can write to it."""
        self._file.close()
