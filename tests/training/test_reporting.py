"""Warnings and other messages that a run logs during training."""

import json
import logging
import math
import shutil
from pathlib import Path

import pytest

from openclip_ext.files import json_lines
from openclip_ext.training.config import ReportingConfig, RunFolderConfig
from openclip_ext.training.runtime import run_folder
from openclip_ext.training.runtime.reporting import Reporter, Stopwatch
from tests.training.programs import Program

_CHANCE = math.log(64)


def _warnings(
    infonce: list[float],
    caplog: pytest.LogCaptureFixture,
    warmup: int,
    is_steered: bool = False,
    chance: float = _CHANCE,
) -> list[str]:
    """Return the warnings of a run whose logged steps have these InfoNCE values."""
    reporter = Reporter(None, ReportingConfig(warmup=warmup), 0, 1000, 1000, is_steered=is_steered)
    with caplog.at_level(logging.WARNING):
        for number, value in enumerate(infonce):
            record = {"step": number, "epoch": 0, "global_batch": 64, "loss": 0.05, "terms": {}, "chance": chance}
            record |= {"temperature": 0.05, "lr": 1e-3, "infonce": value}
            reporter.train_step(record, Stopwatch())
    return [message for message in caplog.messages if "at chance" in message]


# InfoNCE of two runs on the icons data: the embeddings of the first run collapsed after 150 steps, the second run learned.
_COLLAPSED = [5.9011, 3.9004, 3.4500, 4.3881, 4.1629, 4.1638, 4.1616, 4.1624, 4.1618, 4.1630, 4.1623]
_HEALTHY = [5.9011, 4.1600, 4.1610, 4.1590, 3.9004, 3.8153, 3.4500, 3.1, 2.9, 2.8]


@pytest.mark.parametrize(
    ("infonce", "warmup", "is_steered", "count"),
    [(_COLLAPSED, 0, False, 1), (_COLLAPSED, 7, False, 0), (_COLLAPSED, 0, True, 0), (_HEALTHY, 0, False, 0)],
)
def test_a_collapse_after_the_warmup_is_named_once(infonce, warmup, is_steered, count, caplog) -> None:
    messages = _warnings(infonce, caplog, warmup, is_steered)
    assert len(messages) == count
    assert all("4.1589" in message and "--lr" in message for message in messages)


def test_batches_without_negatives_are_no_collapse(caplog) -> None:
    assert not _warnings([0.0] * 20, caplog, warmup=0, chance=0.0)


def test_a_line_that_a_full_disk_has_torn_is_not_glued_to_the_next(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 0}\n{"st')
    reporter = Reporter(tmp_path, ReportingConfig(), first_step=0, steps_left=10, steps_per_epoch=10)
    for epoch in (1, 2):
        reporter.epoch_end({"step": epoch, "epoch": epoch}, bad_samples=3)
    assert [line["step"] for line in json_lines.read(tmp_path / "metrics.jsonl")] == [0, 1, 2]


def test_lines_that_could_not_be_written_come_with_the_next(tmp_path: Path) -> None:
    reporter = Reporter(tmp_path, ReportingConfig(), 0, 10, 5)
    reporter.evaluation({"a": 1.0}, {"step": 4, "epoch": 1})
    (tmp_path / "checkpoints").mkdir()
    reporter.evaluation({"a": 2.0}, {"step": 9, "epoch": 2})
    lines = (tmp_path / "checkpoints" / "results.jsonl").read_text().splitlines()
    assert [json.loads(line)["epoch"] for line in lines] == [1, 2]


def test_tensorboard_hides_the_steps_that_a_resume_repeats(tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    for steps in (range(5), range(3, 4)):  # killed after step 4, then resumed at step 3
        destinations = frozenset({"tensorboard"})
        reporter = Reporter(tmp_path, ReportingConfig(destinations), steps.start, 10 - steps.start, 5)
        for step in steps:
            record = {"step": step, "epoch": 0, "global_batch": 64, "loss": 1.0, "terms": {}, "chance": _CHANCE}
            reporter.train_step({**record, "temperature": 0.05, "lr": 1e-3}, Stopwatch())
        reporter.close()
    events = accumulator.EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [event.step for event in events.Scalars("train/loss")] == [0, 1, 2, 3]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_tensorboard_log_that_could_not_be_written_does_not_fail_the_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    reporter = Reporter(tmp_path, ReportingConfig(destinations=frozenset({"tensorboard"})), 0, 10, 5)
    shutil.rmtree(tmp_path / "tensorboard")
    reporter.evaluation({"a": 1.0}, {"step": 4, "epoch": 1})
    reporter.close()
    assert "Cannot write the TensorBoard" in caplog.text


def test_json_has_no_nan() -> None:
    content = {"a": [math.nan, {"b": (-math.inf, 1)}], "c": "NaN"}
    assert json_lines.dumps(content) == '{"a": [null, {"b": [null, 1]}], "c": "NaN"}'


def log_to_a_full_disk(argv: list[str]) -> None:
    with run_folder.opened(RunFolderConfig(Path(argv[0]), "run")):
        (handler,) = [handler for handler in logging.root.handlers if isinstance(handler, logging.FileHandler)]
        for message in ("one", "two", "three"):
            handler.stream = open("/dev/full", "w")  # noqa: SIM115
            logging.warning(message)
            shutil.rmtree(argv[0], ignore_errors=True)
        logging.warning("four")


def test_a_log_that_cannot_be_written_is_said_once(tmp_path: Path) -> None:
    program = Program([str(tmp_path / "logs")], 1, tmp_path / "output", target=log_to_a_full_disk)
    assert program.wait() == [0]
    assert program.text().count("the log file cannot be written") == 1 and "Traceback" not in program.text()
