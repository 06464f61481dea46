"""The small run with which all integrations are tested, and comparisons of runs."""

import contextlib
import io
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils.data import StackDataset

from openclip_ext.contrastive.loss import ContrastiveLoss
from openclip_ext.contrastive.model import LOGIT_SCALE
from openclip_ext.data import with_index
from openclip_ext.losses.registry import create_loss
from tests.distributed.pool import RankPool
from tests.training.tiny import CONTEXT, IMAGE, VOCABULARY, WIDTH

SAMPLES, BATCH = 20, 4
STEPS = SAMPLES // BATCH
LR_TAU = 0.05
EXAMPLES = Path(__file__).parents[2] / "examples"
# Arguments for a short run of an example, and the text that the example prints last.
FEW, PAIRS = ("--samples", "200", "--epochs", "1"), "unseen pairs: image to text 0."


def pairs(index: bool = True) -> Any:
    """Return random images and captions. With ``index``, as for training, each sample contains its index."""
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(SAMPLES, 3, IMAGE, IMAGE, generator=generator)
    texts = torch.randint(1, VOCABULARY - 1, (SAMPLES, CONTEXT), generator=generator)
    texts[:, -1] = VOCABULARY - 1  # the end-of-text token, which has the largest number
    data = StackDataset(image=images, text=texts)
    return with_index(data) if index else data


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
    on_this_rank: Callable[[Path], dict[str, Any]], folder: Path, single: dict[str, Tensor]
) -> None:
    """Assert that only rank 0 printed the example's last line, that resuming is bitwise exact, and that two ranks equal one.

    Args:
        on_this_rank: Function that two processes call with ``folder``. It returns the output of the ``example``, and the final
            states of a ``resumed`` run and of full runs.
        single: Final state of one process. Rounding errors in float32 are amplified by the factor 1/τ.
    """
    # The pool is used only once: trainers keep the process group in global variables, which would affect other tests.
    with contextlib.closing(RankPool()) as pool:
        ranks = pool.run(on_this_rank, folder, group=False)
    assert [PAIRS in rank.pop("example") for rank in ranks] == [True, False]
    for rank in ranks:
        assert_equal_runs(rank.pop("resumed"), rank["whole"])
    first, second = ranks
    for run, state in first.items():
        for name, expected in single.items():
            found = state[name]
            if name.endswith(".shard"):
                found = torch.cat([found, second[run][name]], dim=1)
            else:
                assert torch.equal(found, second[run][name]), name
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
