"""Adam for the networks inside a loss.

An optimizer of ``torch.optim`` is not a module, so the loss's ``state_dict``, ``.double()`` and ``.to()`` do not cover the
optimizer's state. Such an optimizer also cannot skip a step without a host-device sync. :class:`StateAdam` has the same
formulas, is a module, and skips steps without a sync.
"""

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.optim.adam import adam

ADAM_BETAS = (0.9, 0.999)
ADAM_EPS = 1e-8

Objective = Callable[[Callable[..., Tensor]], Tensor]


class StateAdam(nn.Module):
    """``torch.optim.Adam`` with its default β and ε, for a network whose parameters need gradients only in :meth:`step`."""

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

    @torch.no_grad()
    def step(self, network: nn.Module, objectives: Sequence[Objective], lr: float | Tensor, ok: Tensor) -> None:
        """Make one step on the sum of the objectives. Only one objective's graph is in memory at a time.

        Each objective receives the network as a function, and returns a 0-d tensor. Read the fields of a batch before, not in
        the objective, because ``torch.compile`` fails if a field is first computed there. If ``ok`` (0-d bool) is False,
        nothing changes. In eager mode, PyTorch's fused kernel makes the step.
        """
        parameters: list[Tensor] = list(network.parameters())
        find_gradients = _gradients_in_a_graph if torch.compiler.is_compiling() else _gradients
        gradients = [gradient.contiguous() for gradient in find_gradients(network, objectives[0])]
        for objective in objectives[1:]:
            for total, part in zip(gradients, find_gradients(network, objective), strict=True):
                total.add_(part)
        means, squares = (
            [self.get_buffer(f"{name}_{position}") for position in range(len(parameters))]
            for name in ("mean", "square")
        )
        if torch.compiler.is_compiling():
            self._apply_in_a_graph(zip(parameters, gradients, means, squares, strict=True), lr, ok)
            return
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

    def _apply_in_a_graph(self, tensors: Iterable[tuple[Tensor, ...]], lr: float | Tensor, ok: Tensor) -> None:
        """Make the same step as PyTorch's fused kernel, which Dynamo cannot trace."""
        self.steps.add_(ok)
        beta1, beta2 = ADAM_BETAS
        rate = lr / (1 - beta1**self.steps)
        for parameter, gradient, mean, square in tensors:
            new_mean = mean.lerp(gradient, 1 - beta1)
            new_square = square.lerp(gradient.square(), 1 - beta2)
            size = (new_square / (1 - beta2**self.steps)).sqrt() + ADAM_EPS
            for old, new in ((mean, new_mean), (square, new_square), (parameter, parameter - rate * new_mean / size)):
                old.copy_(torch.where(ok, new, old))


@torch.enable_grad()
def _gradients(network: nn.Module, objective: Objective) -> tuple[Tensor, ...]:
    parameters = list(network.parameters())
    for parameter in parameters:
        parameter.requires_grad_(True)
    gradients = torch.autograd.grad(objective(network), parameters)
    for parameter in parameters:
        parameter.requires_grad_(False)
    return gradients


def _gradients_in_a_graph(network: nn.Module, objective: Objective) -> tuple[Tensor, ...]:
    """Return the same gradients as :func:`_gradients`. Dynamo can trace this function, but it is slower in eager mode."""
    names, parameters = zip(*network.named_parameters(), strict=True)

    def value(*values: Tensor) -> Tensor:
        return objective(lambda *inputs: functional_call(network, dict(zip(names, values, strict=True)), inputs))

    return torch.func.grad(value, argnums=tuple(range(len(parameters))))(*parameters)
