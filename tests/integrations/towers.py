"""A small run for all integrations: pairs with an index, and a loss with a state for each sample and a learned temperature."""

from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from openclip_ext.contrastive.loss import ContrastiveLoss
from openclip_ext.data import with_index
from openclip_ext.losses.registry import create_loss
from openclip_ext.training.optimizer import LOGIT_SCALE
from tests.training.tiny import CONTEXT, IMAGE, VOCABULARY, WIDTH

SAMPLES, BATCH = 20, 4
STEPS = SAMPLES // BATCH
LR_TAU = 0.05


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
