"""The small run with which all integrations are tested, and comparisons of runs."""

import contextlib
import io
import runpy
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils.data import Dataset

from openclip_ext.contrastive.loss import ContrastiveLoss
from openclip_ext.contrastive.model import LOGIT_SCALE
from openclip_ext.data import with_index
from openclip_ext.losses.registry import create_loss
from tests.distributed.pool import WORLD_SIZE, RankPool
from tests.training.tiny import CONTEXT, IMAGE, VOCABULARY, WIDTH

SAMPLES, BATCH = 20, 4
STEPS = SAMPLES // BATCH
LR_TAU = 0.05
EXAMPLES = Path(__file__).parents[2] / "examples"
# Arguments for a short run of an example, and the text that the example prints last.
FEW, PAIRS = ("--samples", "200", "--epochs", "1"), "unseen pairs: image to text 0."


class Pairs(Dataset):
    """Random images and captions. Captions end with the end-of-text token, which has the largest number."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(1)
        self.images = torch.randn(SAMPLES, 3, IMAGE, IMAGE, generator=generator)
        self.texts = torch.randint(1, VOCABULARY - 1, (SAMPLES, CONTEXT), generator=generator)
        self.texts[:, -1] = VOCABULARY - 1

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, position: int) -> dict[str, Tensor]:
        return {"image": self.images[position], "text": self.texts[position]}


def pairs() -> Any:
    """Return the training set, whose samples contain their index."""
    return with_index(Pairs())


def stateful_loss(epochs: int = 2) -> ContrastiveLoss:
    """Return FastCLIP, which has per-sample state, a schedule over epochs, and its own temperature learning rate."""
    return create_loss("fastclip", embed_dim=WIDTH, num_samples=SAMPLES, epochs=epochs, lr_tau=LR_TAU)


def final_state(model: torch.nn.Module, loss: ContrastiveLoss) -> dict[str, Tensor]:
    """Return all tensors of a run's final model and loss."""
    state = {f"model.{name}": value for name, value in model.state_dict().items()}
    return state | {f"loss.{name}": value for name, value in loss.state_dict().items()}


def assert_equal_runs(resumed: dict[str, Tensor], uninterrupted: dict[str, Tensor]) -> None:
    """Assert that two runs are bitwise equal, and that they have trained."""
    assert resumed.keys() == uninterrupted.keys()
    different = [name for name, value in uninterrupted.items() if not torch.equal(resumed[name], value)]
    assert not different
    assert uninterrupted["loss._extra_state"].tolist() == [1, 2 * STEPS]
    assert f"model.{LOGIT_SCALE}" not in uninterrupted or uninterrupted[f"model.{LOGIT_SCALE}"].isfinite()


def in_two_processes(function: Callable, *arguments: Any) -> list[Any]:
    """Call a training function on two ranks; return the results of each rank.

    The pool is used only once: trainers keep the process group in global variables, which would affect other tests.
    """
    with contextlib.closing(RankPool()) as ranks:
        return ranks.run(function, *arguments, group=False)


def example(name: str, *arguments: str) -> str:
    """Run an example in this process; return its output. With two processes, only rank 0 prints the last line."""
    with (
        contextlib.redirect_stdout(io.StringIO()) as printed,
        mock.patch.object(sys, "argv", [name, *arguments]),
        mock.patch.object(sys, "path", [str(EXAMPLES), *sys.path]),
    ):
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    return printed.getvalue()


def assert_two_processes_train_as_one(
    ranks: list[Any], single: dict[str, Tensor], parts: dict[str, Tensor], whole: Sequence[str] = ("whole",)
) -> None:
    """Assert that only rank 0 printed the example's last line, and that all runs equal the runs of one process.

    Args:
        ranks: For each process, the example's output, and the final states of full runs and of a resumed run.
        single, parts: Final states of one process, with full batches and with micro-batches.
        whole: Names of the full runs in ``ranks``.
    """
    assert [PAIRS in rank["example"] for rank in ranks] == [True, False], ranks
    assert_close_runs(parts, single)
    for name in whole:
        assert_two_equal_one([rank[name] for rank in ranks], single)
    for rank in ranks:
        assert_equal_runs(rank["resumed"], rank[whole[0]])


def assert_two_equal_one(ranks: list[dict[str, Tensor]], single: dict[str, Tensor]) -> None:
    """Assert that both processes have the same model, and that their model and loss state equal a single process's."""
    for name, expected in single.items():
        parts = [rank[name] for rank in ranks]
        if name.endswith(".shard"):
            parts = [torch.cat(parts, dim=1)]
        assert all(torch.equal(part, parts[0]) for part in parts), name
        assert_close_runs({name: parts[0]}, {name: expected})
    assert len(ranks) == WORLD_SIZE


def assert_close_runs(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Assert that runs are equal except for float32 rounding errors, which the factor 1/τ amplifies."""
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
