"""Train with large batches in little memory, with exact gradients, in any training loop."""

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from openclip_ext.contrastive.model import LOGIT_SCALE, SCALARS, frozen_batchnorm_statistics

# Names of the outputs that a loss may use: embeddings, and the captions of CoCa.
_ROWS = ("image_features", "text_features", "image_embeds", "text_embeds", "logits", "labels")


def in_micro_batches(model: nn.Module, size: int) -> nn.Module:
    """Make a model compute training batches in micro-batches. Only one micro-batch at a time has activations in memory.

    The loss and its gradient do not change, because the backward pass computes each micro-batch again with the same random
    numbers (GradCache, Gao et al. 2021). Only batch normalization differs: it uses the statistics of each micro-batch. Use
    this function in ``transformers.Trainer``, Lightning, accelerate and custom training loops. In ``sentence-transformers``,
    whose models have one tower, set ``micro_batch_size`` of the loss instead.

    Args:
        model: Two-tower model of OpenCLIP (``output_dict=True``) or ``transformers``, which is not yet compiled or wrapped.
            Its inputs are tensors whose rows are samples. The model is changed in place. ``torch.compile`` then has no effect.
        size: Number of samples per micro-batch.

    Returns:
        The model. In training mode, it returns a dictionary with the embeddings, the captions of CoCa, ``logit_scale`` and
        ``logit_bias``.

    Raises:
        ValueError: The size is not positive.
        AttributeError: The model has no ``logit_scale``.

    Example:
        >>> model = in_micro_batches(model, 64)
        >>> model_loss(model(image, text)).backward()  # of 4,096 pairs
    """
    if not isinstance(size, int) or size < 1:
        raise ValueError(f"size={size!r}: expected a whole number of samples, at least 1")
    model.get_parameter(LOGIT_SCALE)  # raises AttributeError now if the model has no such parameter
    model.forward = _MicroBatches(model, model.forward, size)
    return model


class _MicroBatches:
    """The forward pass of a model in micro-batches. A deep copy of the model copies this object, but not a closure."""

    def __init__(self, model: nn.Module, original: Callable[..., Any], size: int) -> None:
        self._model, self._original, self._size = model, original, size
        functools.update_wrapper(self, original)

    @torch.compiler.disable  # Dynamo cannot trace checkpoints with a context
    def __call__(self, *args: Any, **inputs: Any) -> Any:
        model, size = self._model, self._size
        if not (model.training and torch.is_grad_enabled()):
            return self._original(*args, **inputs)
        count = next(len(value) for value in (*args, *inputs.values()) if isinstance(value, Tensor))
        parts = [
            checkpoint(
                self._embeddings,
                *(rows_of(value, first, size, count) for value in args),
                **{name: rows_of(value, first, size, count) for name, value in inputs.items()},
                use_reentrant=False,
                context_fn=lambda: (contextlib.nullcontext(), frozen_batchnorm_statistics(model)),
            )
            for first in range(0, count, size)
        ]
        rows = {name: torch.cat([part[name] for part in parts]) for name in parts[0].keys() - SCALARS}
        # The scalars must be outputs, because DistributedDataParallel finds the parameters in use through the outputs.
        logit_scale = model.get_parameter(LOGIT_SCALE).exp()
        return rows | {LOGIT_SCALE: logit_scale} | {name: parts[0][name] for name in SCALARS if name in parts[0]}

    def _embeddings(self, *args: Any, **inputs: Any) -> dict[str, Tensor]:
        outputs = self._original(*args, **inputs)
        return {name: outputs[name] for name in (*_ROWS, *SCALARS) if outputs.get(name) is not None}


def rows_of(value: Any, first: int, size: int, count: int) -> Any:
    """Return the rows of a micro-batch. A value that does not have ``count`` rows, one per sample, is returned unchanged."""
    return value[first : first + size] if isinstance(value, Tensor) and value.ndim and len(value) == count else value
