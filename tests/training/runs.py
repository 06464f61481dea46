"""Short training runs on a few demo shards, in this process or on two ranks."""

import functools
import itertools
import json
import signal
from collections.abc import Container, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import open_clip
import torch
from torch import nn

from openclip_ext import model_configs
from openclip_ext.data.shapes.write import ShapesConfig, write_shards
from openclip_ext.losses.registry import list_losses
from openclip_ext.training import trainer
from openclip_ext.training.main import main
from openclip_ext.training.runtime import signals
from openclip_ext.training.step import TrainStep
from tests.distributed.pool import two_ranks
from tests.training.tiny import flat

NUM_SAMPLES, SAMPLES_PER_SHARD = 84, 12
EXIT_AFTER_SIGTERM = signals.EXIT_AFTER_SIGTERM

# Cached, because a new tokenizer reads 48,000 merges, which takes longer than most steps of a short run.
open_clip.factory.SimpleTokenizer = functools.cache(open_clip.factory.SimpleTokenizer)

# The values are small so that every part of a loss becomes active within a few steps.
_FLAGS = {
    "openclip": ["--local-loss", "--gather-with-grad"],
    "fastclip": ["--gamma-decay-epochs", "2"],
    "fastclip-v1": ["--temperature-scheme=solved", "--temperature=none", "--temperature-queue=24", "--rho=1"],
    "amorlip": ["--fit-every", "2", "--loss-option=target_every=2"],
    "neuclip": ["--prototypes", "24", "--normalizer-updates", "2", "--restart-every", "4"],
    "neuclip-paper": ["--prototypes", "24", "--normalizer-updates", "2", "--restart-every", "4"],
    "queueclip": ["--prototypes", "24"],
    "sogclr": ["--views", "2"],
    "cliplite": ["--opt", "timm/lookahead_sgd", "--lookahead-steps", "3", "--momentum", "0.9", "--caption-aware-flip"],
}
# Every registered loss is included, so a new loss is tested without changes to the tests.
LOSS_FLAGS = {loss: _FLAGS.get(loss, []) for loss in list_losses()}

# demo-vit with a narrower text tower, because most of a demo-vit checkpoint is the embedding table of 49,408 tokens.
SMALL_MODEL = "small-vit"
open_clip.add_model_config(Path(__file__).with_name(f"{SMALL_MODEL}.json"))
_MODEL = ["--model", "demo-vit", "--precision", "fp32", "--device", "cpu", "--batch-size", "16", "--workers", "0"]


def make_shards(folder: Path) -> str:
    """Write the demo shards and return their pattern for ``--train-data``."""
    write_shards(folder, ShapesConfig(NUM_SAMPLES, 0, "train", SAMPLES_PER_SHARD), workers=1)
    last = (NUM_SAMPLES - 1) // SAMPLES_PER_SHARD
    return str(folder / f"{{00000..{last:05d}}}.tar")


def command(shards: str, logs: Path, name: str, loss: str, *more: str) -> list[str]:
    """Return the arguments of a run with 2 epochs of 5 steps and a batch of 16."""
    run = ["--train-data", shards, "--logs", str(logs), "--name", name, "--loss", loss, "--epochs", "2", "--seed", "3"]
    training = ["--lr", "1e-3", "--warmup", "3", "--log-every-n-steps", "1", "--force-patch-dropout", "0.2"]
    return [*run, *_MODEL, *training, *LOSS_FLAGS[loss], *more]


def small_command(shards: str, logs: Path, name: str, loss: str, *more: str) -> list[str]:
    """Return the arguments of a run with ``small-vit``. Only this module and paced.py add this model to OpenCLIP."""
    return command(shards, logs, name, loss, "--model", SMALL_MODEL, *more)


def evaluation(logs: Path, name: str, *more: str) -> list[str]:
    """Return the arguments of an evaluation without training."""
    return [*_MODEL, "--logs", str(logs), "--name", name, *more]


def run(argv: list[str], stop_after: int | None = None) -> int:
    """Train in this process and return the exit status. ``stop_after`` is the step at which SIGTERM stops the run."""
    calls = itertools.count(1)

    class Terminating(trainer.SignalRequests):
        def poll_ranks(self, now=False):
            if next(calls) == stop_after:
                signal.raise_signal(signal.SIGTERM)
            return super().poll_ranks(now)

    with mock.patch.object(trainer, "SignalRequests", Terminating):
        try:
            main(argv)
        except SystemExit as stop:
            return int(stop.code or 0)
    return 0


def train(shards: str, logs: Path, name: str, loss: str, *more: str, stops: Sequence[int] = ()) -> Path:
    """Train ``small-vit``. Stop and resume the run after each number of steps in ``stops``. Return the run folder."""
    argv = small_command(shards, logs, name, loss, *(["--resume", "latest"] if stops else []), *more)
    for stop in stops:
        assert run(argv, stop_after=stop) == EXIT_AFTER_SIGTERM
    assert run(argv) == 0
    return logs / name


def train_on_two_ranks(shards: str, logs: Path, loss: str, *more: str) -> Path:
    """Train on two ranks, and assert that a run that is stopped and resumed is the same. Return the run folder."""
    flags = ["--batch-size", "8", "--resume", "latest", *more]
    whole, resumed = (small_command(shards, logs, name, loss, *flags) for name in ("whole", "resumed"))
    run_on_two_ranks(whole)
    run_on_two_ranks(resumed, stop_after=8)
    run_on_two_ranks(resumed)
    assert_same_run(logs / "resumed", logs / "whole")
    return logs / "whole"


def run_on_two_ranks(argv: list[str], stop_after: int | None = None) -> None:
    """Call :func:`run` on two gloo ranks; assert that it ends as it should."""
    statuses = two_ranks().run(run, argv, stop_after, group=False)
    assert statuses == [0 if stop_after is None else EXIT_AFTER_SIGTERM] * 2


def spoil_samples(patch: Any, numbers: Container[int], count: int | None = 1) -> None:
    """Set the first ``count`` samples (all if None) of each micro-batch in the steps ``numbers`` to NaN."""

    def step(self, batches, number=0, take=TrainStep.__call__):
        for batch in batches if number in numbers else ():
            batch["image"] = batch["image"].float()
            batch["image"][:count] = float("nan")
        return take(self, batches, number)

    patch.setattr(TrainStep, "__call__", step)


def contents(folder: Path) -> dict[str, bytes]:
    """Map the relative path of every file below a folder to its bytes."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def flip_a_bit(path: Path) -> bytes:
    """Invert one bit in the middle of a file; return the new content."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    return bytes(content)


def metrics_of(folder: Path) -> list[dict]:
    """Return the parsed lines of a run's ``metrics.jsonl``; an empty list if the file does not exist."""
    log = folder / "metrics.jsonl"
    return [json.loads(line) for line in log.read_text().splitlines()] if log.is_file() else []


def results_of(folder: Path) -> list[dict]:
    """Return the parsed lines of a run's ``results.jsonl``; each line is one evaluation."""
    return [json.loads(line) for line in (folder / "checkpoints" / "results.jsonl").read_text().splitlines()]


def losses_of(folder: Path) -> list[tuple[int, float, float]]:
    """Return a tuple (step, loss, InfoNCE) for every logged step."""
    return [(line["step"], line["loss"], line["infonce"]) for line in metrics_of(folder) if "loss" in line]


def assert_same_run(found: Path, expected: Path) -> None:
    """Assert that two finished runs are bitwise equal: every logged loss, the model file, and the state of all ranks."""
    assert losses_of(found) == losses_of(expected)
    assert differences(final_state(found), final_state(expected)) == []


def final_state(folder: Path) -> dict:
    """Return the content of a run's last model file, and the saved state of all ranks."""
    model_file = max((folder / "checkpoints").glob("epoch_[0-9]*.pt"), key=lambda path: int(path.stem.split("_")[1]))
    content = torch.load(model_file, weights_only=True)
    content.pop("name")
    state = {
        file.name: torch.load(file, weights_only=True)
        for file in sorted(model_file.with_suffix(".state").glob("*/*.pt"))
    }
    assert state
    tables = {
        file.name: torch.from_numpy(np.load(file)) for file in sorted(model_file.with_suffix(".state").glob("*/*.npy"))
    }
    return {"model": content, **state, **tables}


def stock_model(checkpoint: Path, name: str = "demo-vit") -> nn.Module:
    """Load a run's checkpoint in stock OpenCLIP; assert that the weights equal the file bit for bit, and return the model."""
    # OpenCLIP uses the last added configuration with this name, and another test may have added a different configuration.
    open_clip.add_model_config(Path(model_configs.__file__).parent)
    model = open_clip.create_model(name, pretrained=str(checkpoint))
    saved = torch.load(checkpoint, weights_only=True)["state_dict"]
    saved = {name.removeprefix("module."): value for name, value in saved.items()}
    assert differences(dict(model.state_dict()), saved) == []
    return model


def differences(first, second) -> list[str]:
    """Return the paths at which two nested states differ bitwise; NaN equals NaN."""
    one, other = flat(first), flat(second)
    return [path for path in sorted(one.keys() | other.keys()) if not _is_same(one.get(path), other.get(path))]


def _is_same(first, second) -> bool:
    if not (isinstance(first, torch.Tensor) and isinstance(second, torch.Tensor)):
        return type(first) is type(second) and first == second
    same = first.dtype == second.dtype and first.shape == second.shape and torch.equal(first.isnan(), second.isnan())
    return same and torch.equal(torch.nan_to_num(first), torch.nan_to_num(second))
