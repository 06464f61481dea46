"""Arithmetic in log space, which avoids overflow.

With ``τ = 0.01`` the exponents ``(s_ij − s_ii)/τ`` reach 200, and ``exp(200)`` is infinite in float32. Normalizers are
therefore stored as logarithms, and the largest exponent is subtracted from all exponents of a sum.
"""

import math

import torch
from torch import Tensor

_LOG2_E = 1 / math.log(2)


def max_exponent(dtype: torch.dtype) -> float:
    """Return the bound to which :func:`saturating_exp` clamps. The square of the bound's ``exp`` is finite in ``dtype``."""
    return 0.45 * math.log(torch.finfo(dtype).max)


def saturating_exp(exponent: Tensor) -> Tensor:
    """Return ``exp`` of exponents clamped to :func:`max_exponent`.

    If an estimate is very wrong, the exact weight may overflow. The clamped weight stays finite.
    """
    return exponent.clamp(max=max_exponent(exponent.dtype)).exp()


def log_add(log_x: Tensor, constant: float) -> Tensor:
    """Return ``log(x + constant)`` for ``constant ≥ 0``."""
    if constant == 0.0:
        return log_x
    return torch.logaddexp(log_x, log_x.new_full((), math.log(constant)))


def log_mix(log_x: Tensor, log_y: Tensor, share: float | Tensor) -> Tensor:
    """Return ``log((1 − share)·x + share·y)`` for a share in [0, 1]."""
    if isinstance(share, Tensor):
        return torch.logaddexp(log_x + torch.log1p(-share), log_y + share.log())
    if share == 0.0:
        return log_x
    if share == 1.0:
        return log_y
    return torch.logaddexp(log_x + math.log1p(-share), log_y + math.log(share))


def exp_(exponents: Tensor) -> Tensor:
    """Overwrite exponents with their exponentials.

    On a CPU, PyTorch's ``exp`` uses MKL. On AMD processors, MKL's ``exp`` is four times slower than PyTorch's own ``exp2``.
    """
    return exponents.mul_(_LOG2_E).exp2_() if exponents.is_cpu else exponents.exp_()


def shifted_exp_(exponents: Tensor, dim: int) -> Tensor:
    """Overwrite exponents with ``exp(exponent − largest)``; return the largest along ``dim``, without that dimension."""
    largest = exponents.amax(dim, keepdim=True)
    exp_(exponents.sub_(largest))
    return largest.squeeze(dim)


def softmax_terms(exponents: Tensor, dim: int, has_masked: bool = True) -> tuple[Tensor, Tensor | None, Tensor]:
    """Return the softmax along ``dim`` as two factors, ``terms`` and ``scale``, and the log of the sum of ``exp``.

    ``exponents`` may be overwritten. ``scale`` and the log have no dimension ``dim``. On a GPU, ``scale`` is None, which means
    1: torch's softmax launches fewer kernels. On a CPU, a multiplication of all terms would be one more pass over the memory.
    ``has_masked``: whether exponents may be much smaller than the largest, or −∞, to mask them.
    """
    if exponents.is_cpu:
        largest = shifted_exp_(exponents, dim)
        total = exponents.sum(dim)
        return exponents, total.reciprocal(), total.log_().add_(largest)
    log_softmax = torch.log_softmax(exponents, dim)
    # For each sum, the difference of any exponent and its log-softmax is the result, but rounding is worse if it is masked.
    pair = [values.amax(dim) if has_masked else values.select(dim, 0) for values in (exponents, log_softmax)]
    log_sum = pair[0] - pair[1]  # before exp_, because one of the pair may be a view
    return log_softmax.exp_(), None, log_sum


def cosine_decay(start: float, end: float, epoch: int | Tensor, epochs: int) -> float | Tensor:
    """Return the value at ``epoch`` of a half cosine, from ``start`` at epoch 0 to ``end`` at epoch ``epochs`` and later."""
    if isinstance(epoch, Tensor):
        return end + 0.5 * (start - end) * (1 + (math.pi * (epoch / epochs).clamp(0, 1)).cos())
    progress = min(max(epoch, 0) / epochs, 1.0)
    return end + 0.5 * (start - end) * (1 + math.cos(math.pi * progress))
