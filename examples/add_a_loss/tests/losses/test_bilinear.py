import torch

from openclip_ext.losses.registry import create_loss
from tests.losses.cases import WIDTH, make_steps, run_step


def test_bilinear_is_the_mean_over_all_pairs() -> None:
    step = make_steps(1)[0]
    loss = create_loss("bilinear", embed_dim=WIDTH).double()
    matrix = loss.model_head().layer.weight.detach()
    total = 0.0
    for i, image in enumerate(step.images):
        for j, text in enumerate(step.texts):
            sign = 1 if i == j else -1
            total += torch.log1p(torch.exp(-sign * step.logit_scale * (text @ (matrix @ image)))).item()
    value, _ = run_step(loss, step)
    assert abs(value.item() - total / len(step.images) ** 2) < 1e-12
