"""Pure log-space mathematics of the global contrastive losses: no state, no communication.

Notation of ``docs/methods/README.md``: ``s_ij`` similarity of image ``i`` and text ``j``, ``τ`` temperature, ``B`` samples
in the batch, ``log g_i = logsumexp_{j≠i} (s_ij − s_ii)/τ − log(B−1)``, ``α_i`` estimated log-normalizer. Tensors with a
leading dimension of 2 hold the two sides: 0 for image anchors (against texts), 1 for text anchors (against images).
Equation numbers in [brackets] are the papers'.
"""

import math

import torch
from torch import Tensor

# Stands for the similarity of a pair that does not count. Divided by any temperature in (0, 1] its exponential is 0, and
# unlike -inf it may be multiplied by that 0.
MASKED_SIMILARITY = -1e4


def max_exponent(dtype: torch.dtype) -> float:
    """Largest exponent that is taken: its exponential, squared, is still finite in ``dtype``.

    Where an estimate is so wrong that the true weight overflows, the weight saturates instead of becoming infinite.
    """
    return 0.45 * math.log(torch.finfo(dtype).max)


def saturating_exp(exponent: Tensor) -> Tensor:
    """``exp``, bounded by :func:`max_exponent`."""
    return exponent.clamp(max=max_exponent(exponent.dtype)).exp()


def log_add(log_x: Tensor, constant: float) -> Tensor:
    """``log(x + constant)`` for ``constant ≥ 0``."""
    if constant == 0.0:
        return log_x
    return torch.logaddexp(log_x, log_x.new_full((), math.log(constant)))


def log_mix(log_x: Tensor, log_y: Tensor, share: float) -> Tensor:
    """``log((1 − share)·x + share·y)`` for a share in [0, 1]."""
    if share == 0.0:
        return log_x
    if share == 1.0:
        return log_y
    return torch.logaddexp(log_x + math.log1p(-share), log_y + math.log(share))


def shifted_exp_(exponents: Tensor, dim: int) -> Tensor:
    """Overwrite exponents with ``exp(exponent − largest)``, the largest along ``dim``, which is returned without it."""
    largest = exponents.amax(dim, keepdim=True)
    exponents.sub_(largest).exp_()
    return largest.squeeze(dim)


def infonce(log_g: Tensor, negatives: Tensor) -> Tensor:
    """Mini-batch InfoNCE of each anchor from its ``log g`` over so many negatives: ``log(1 + (B−1)·g)``."""
    return log_add(log_g + torch.log(negatives), 1.0)


def amortization_objective(name: str, log_lambda: Tensor, log_target: Tensor, log_batch: Tensor, tau: Tensor) -> Tensor:
    """What a normalizer network minimises, per anchor.

    Args:
        name: ``l2-log`` [AmorLIP 10], ``kl`` and ``js`` [AmorLIP 8], ``kl-printed`` [AmorLIP 9, as printed], ``unified``
            [NeuCLIP 12].
        log_lambda: the prediction.
        log_target: ``log Z_comb`` [AmorLIP 12].
        log_batch: ``log Z``, the batch's own.
        tau: temperatures.

    The divergences take the batch's pairs as samples of P, so that their weight is ``Z/Z_comb``, and have 0.1 of l2-log
    added (AmorLIP, Appendix C).
    """
    log_ratio = log_target - log_lambda
    if name == "unified":
        return tau * (saturating_exp(log_ratio) + log_lambda)
    squared = 0.5 * log_ratio.square()
    if name == "l2-log":
        return squared
    log_ratio = log_ratio.clamp(max=max_exponent(log_ratio.dtype))
    ratio = log_ratio.exp()
    if name == "kl":
        divergence = ratio * log_ratio - ratio + 1
    elif name == "js":
        divergence = 0.5 * (ratio * log_ratio - (ratio + 1) * (torch.log1p(ratio) - math.log(2)))
    elif name == "kl-printed":
        divergence = ratio * log_ratio
    else:
        raise ValueError(f"unknown objective {name!r}")
    return saturating_exp(log_batch - log_target) * divergence + 0.1 * squared


def objective_slope(name: str, log_ratio: Tensor) -> Tensor:
    """Derivative in ``α`` of what the prototypes minimise, per anchor, over :func:`objective_factor`.

    ``unified``: ``τ·(exp(−α)(ε+g) + α)`` [NeuCLIP 12]; ``l2-log``: ``½(α − log(ε+g))²`` (NeuCLIP, section 5.2).

    Args:
        name: which.
        log_ratio: ``log(ε+g) − α``.
    """
    if name == "unified":
        return 1 - saturating_exp(log_ratio)
    if name == "l2-log":
        return -log_ratio
    raise ValueError(f"normalizer_objective={name!r}: prototypes take unified or l2-log")


def objective_factor(name: str, tau: Tensor) -> Tensor:
    """Factor of what the prototypes minimise that does not depend on ``α``: ``τ``, or 1; see :func:`objective_slope`."""
    return tau if name == "unified" else torch.ones_like(tau)


def cosine_decay(start: float, end: float, epoch: int, epochs: int) -> float:
    """Half a cosine from ``start`` at epoch 0 to ``end`` from epoch ``epochs`` on."""
    progress = min(max(epoch, 0) / epochs, 1.0)
    return end + 0.5 * (start - end) * (1 + math.cos(math.pi * progress))
