"""``--profile`` traces some steps of a run, and says so where a run is too short for it."""

import gzip
import json

from tests.training.runs import command, run


def test_some_steps_are_traced(shards, tmp_path):
    assert (
        run(command(shards, tmp_path, "run", "openclip", "--batch-size", "4", "--epochs", "2", "--profile", "2")) == 0
    )
    folder = tmp_path / "run" / "profile"
    assert "aten::" in (folder / "table.txt").read_text()
    events = json.loads(gzip.decompress((folder / "trace.json.gz").read_bytes()))["traceEvents"]
    assert sum(event["name"].startswith("ProfilerStep#") and event["ph"] == "X" for event in events) == 2


def test_a_run_that_is_too_short_says_so(shards, tmp_path, caplog):
    assert (
        run(command(shards, tmp_path, "run", "openclip", "--batch-size", "8", "--epochs", "1", "--profile", "2")) == 0
    )
    assert "the run ended before its step 14" in (tmp_path / "run" / "out.log").read_text()
    assert not (tmp_path / "run" / "profile").exists()
