"""Adam for the networks inside a loss.

``torch.optim`` stores its state outside of modules: ``state_dict``, ``.double()`` and ``.to()`` of the loss miss it, and it
cannot skip a step without a host-device sync. This one has the same formulas with tensors as state.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.optim.adam import adam

ADAM_BETAS = (0.9, 0.999)
ADAM_EPS = 1e-8


class InnerAdam(nn.Module):
    """``torch.optim.Adam`` with its default β and ε, for a network that requires gradients only in :meth:`step`."""

    steps: Tensor

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        network.requires_grad_(False)
        for position, parameter in enumerate(network.parameters()):
            self.register_buffer(f"mean_{position}", torch.zeros_like(parameter))
            self.register_buffer(f"square_{position}", torch.zeros_like(parameter))
        self.register_buffer("steps", torch.zeros(()))

    @torch.no_grad()
    def reset(self) -> None:
        for buffer in self.buffers():
            buffer.zero_()

    def step(self, network: nn.Module, objectives: Sequence[Callable[[], Tensor]], lr: float, ok: Tensor) -> None:
        """Make one step of the network on the sum of the objectives, with the graph of one objective in memory at a time.

        An objective computes a 0-d term of the loss from the network's parameters. If ``ok`` (0-d bool) is False, nothing
        changes.
        """
        parameters: list[Tensor] = list(network.parameters())
        with torch.enable_grad():
            for parameter in parameters:
                parameter.requires_grad_(True)
            gradients = torch.autograd.grad(objectives[0](), parameters)
            for objective in objectives[1:]:
                for total, part in zip(gradients, torch.autograd.grad(objective(), parameters), strict=True):
                    total.add_(part)
            for parameter in parameters:
                parameter.requires_grad_(False)
        self.apply_gradients(parameters, [gradient.contiguous() for gradient in gradients], lr, ok)

    @torch.no_grad()
    def apply_gradients(self, parameters: list[Tensor], gradients: list[Tensor], lr: float, ok: Tensor) -> None:
        """Make one step on given gradients with one kernel, which changes nothing if ``ok`` is False."""
        means, squares = (
            [self.get_buffer(f"{name}_{position}") for position in range(len(parameters))]
            for name in ("mean", "square")
        )
        steps = list(self.steps.to(torch.float32).repeat(len(parameters)))
        adam(
            parameters,
            gradients,
            means,
            squares,
            [],
            steps,
            fused=True,
            found_inf=(~ok).to(torch.float32),
            amsgrad=False,
            beta1=ADAM_BETAS[0],
            beta2=ADAM_BETAS[1],
            lr=lr,
            weight_decay=0.0,
            eps=ADAM_EPS,
            maximize=False,
        )
        self.steps.copy_(steps[0])
