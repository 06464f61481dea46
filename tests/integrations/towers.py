"""A small run for all integrations: pairs with an index, and a loss with a state for each sample and a learned temperature."""

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
# Arguments of an example, and what it prints at its end.
FEW, PAIRS = ("--samples", "200", "--epochs", "1"), "unseen pairs: image to text 0."


class Pairs(Dataset):
    """Random images and captions that end with the end-of-text token, the largest."""

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
    """The training set, with its index."""
    return with_index(Pairs())


def stateful_loss(epochs: int = 2) -> ContrastiveLoss:
    """FastCLIP: per-sample state, a schedule over the epochs, a temperature with a learning rate of its own."""
    return create_loss("fastclip", embed_dim=WIDTH, num_samples=SAMPLES, epochs=epochs, lr_tau=LR_TAU)


def final_state(model: torch.nn.Module, loss: ContrastiveLoss) -> dict[str, Tensor]:
    """All that a run leaves behind."""
    state = {f"model.{name}": value for name, value in model.state_dict().items()}
    return state | {f"loss.{name}": value for name, value in loss.state_dict().items()}


def assert_equal_runs(resumed: dict[str, Tensor], uninterrupted: dict[str, Tensor]) -> None:
    """Bit for bit; and the runs did train."""
    assert resumed.keys() == uninterrupted.keys()
    different = [name for name, value in uninterrupted.items() if not torch.equal(resumed[name], value)]
    assert not different
    assert uninterrupted["loss._extra_state"].tolist() == [1, 2 * STEPS]
    assert f"model.{LOGIT_SCALE}" not in uninterrupted or uninterrupted[f"model.{LOGIT_SCALE}"].isfinite()


def in_two_processes(function: Callable, *arguments: Any) -> list[Any]:
    """What a function that trains returns on each rank.

    The trainers make the group of processes, and keep it in globals: no other test may have these processes.
    """
    with contextlib.closing(RankPool()) as ranks:
        return ranks.run(function, *arguments, group=False)


def example(name: str, *arguments: str) -> str:
    """Run an example in this process and return what it printed; in two processes the first one prints the end."""
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
    """Both processes came to the end of the example, where the first one prints; all runs equal that of one process.

    Args:
        ranks: of each process the output of the example, the final states ``whole``, and ``resumed``, a resumed first one.
        single, parts: final states of one process, with whole batches and in micro-batches.
    """
    assert [PAIRS in rank["example"] for rank in ranks] == [True, False], ranks
    assert_close_runs(parts, single)
    for name in whole:
        assert_two_equal_one([rank[name] for rank in ranks], single)
    for rank in ranks:
        assert_equal_runs(rank["resumed"], rank[whole[0]])


def assert_two_equal_one(ranks: list[dict[str, Tensor]], single: dict[str, Tensor]) -> None:
    """The processes' models are equal, and they and the loss's state are what one process with the whole batch has."""
    for name, expected in single.items():
        parts = [rank[name] for rank in ranks]
        if name.endswith(".shard"):
            parts = [torch.cat(parts, dim=1)]
        assert all(torch.equal(part, parts[0]) for part in parts), name
        assert_close_runs({name: parts[0]}, {name: expected})
    assert len(ranks) == WORLD_SIZE


def assert_close_runs(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Equal but for the rounding of single precision, of which 1/τ makes more."""
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
