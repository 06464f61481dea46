"""Training runs with a reference model: bitwise equal resumes, accumulation, and two ranks."""

import json
from pathlib import Path

import pytest

from openclip_ext.data.reference import ABOUT, EmbeddingStore
from openclip_ext.evaluation.run_folder import read_config
from tests.data.test_reference import write_store
from tests.training.runs import (
    EXIT_AFTER_SIGTERM,
    assert_same_run,
    losses_of,
    metrics_of,
    run,
    run_on_two_ranks,
    small_command,
    train,
)

DISTILLED = ("--distill", "0.5")


@pytest.fixture(scope="module")
def reference(shards, tmp_path_factory):
    return str(write_store(tmp_path_factory.mktemp("reference") / "store", shards))


@pytest.mark.parametrize(
    ("loss", "more"),
    [
        ("queueclip", ()),
        ("queueclip", ("--mask-margin", "0.2", "--no-steer")),
        ("openclip", (*DISTILLED, "--no-steer")),
        ("amorlip", DISTILLED),
    ],
)
def test_a_resumed_run_is_the_same(shards, reference, tmp_path, loss, more):
    for name, stops in (("whole", []), ("resumed", [3])):
        train(shards, tmp_path, name, loss, "--reference", reference, *more, stops=stops)
    assert_same_run(tmp_path / "resumed", tmp_path / "whole")
    # The settings contain the reference model's temperature, unless the user gave another.
    used = read_config(tmp_path / "whole")["loss"]["options"]["reference_temperature"]
    assert used == pytest.approx(EmbeddingStore.open(Path(reference)).temperature)
    last = metrics_of(tmp_path / "whole")[-1]
    assert 0 <= last["reference_ahead"] <= 1 and last["reference_infonce"] > 0


def test_a_run_reports_unreadable_samples_and_a_resume_other_weights(shards, tmp_path, caplog):
    folder = write_store(tmp_path / "store", shards, weights="a", unreadable=2)
    argv = small_command(shards, tmp_path, "run", "openclip", "--reference", str(folder), "--resume", "latest")
    assert run(argv, stop_after=2) == EXIT_AFTER_SIGTERM
    assert caplog.text.count("2 of 84 samples were unreadable") == 1
    about = json.loads((folder / ABOUT).read_text())
    (folder / ABOUT).write_text(json.dumps(about | {"weights": "b"}))
    assert run(argv, stop_after=1) == EXIT_AFTER_SIGTERM
    assert "The run continues with changed settings: reference_weights b (before: a)." in caplog.text
    caplog.clear()
    assert run(argv) == 0
    assert "changed settings" not in caplog.text


def test_accumulation_equals_the_large_batch_and_two_ranks_train(shards, reference, tmp_path):
    """One rank and two ranks have different batches, so only the steps are counted. Tests of the losses compare values."""
    given = ("--reference", reference, *DISTILLED, "--force-patch-dropout", "0")
    half = ("--batch-size", "8")
    one = train(shards, tmp_path, "one", "queueclip", *given)
    parts = train(shards, tmp_path, "parts", "queueclip", *given, *half, "--accum-freq", "2")
    for ours, theirs in zip(losses_of(parts), losses_of(one), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-4)
    run_on_two_ranks(small_command(shards, tmp_path, "two", "queueclip", *given, *half))
    assert len(losses_of(tmp_path / "two")) == 10
