"""The interface of all losses."""

import contextlib
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from openclip_ext import compat, distributed
from openclip_ext.cli.errors import UsageError, one_line
from openclip_ext.cli.messages import get_logger
from openclip_ext.contrastive import checks
from openclip_ext.contrastive.batch import LocalBatch
from openclip_ext.contrastive.host_number import HostNumber
from openclip_ext.contrastive.loop_checks import LoopChecks
from openclip_ext.state.sharded_table import ShardedTable, exclude_tables
from openclip_ext.state.table_files import restore_table

logger = get_logger(__name__)
# Name of the model's output with the embeddings of hard negatives: captions that are similar, but do not match the image.
HARD_NEGATIVES = "hard_negative_features"


class StateSize(NamedTuple):
    """Bytes of a loss's state in one process, on the model's device.

    ``replicated`` state is equal in every process: networks, prototypes and their optimizers. ``per_sample`` state is this
    process's shards of the tables.
    """

    replicated: int
    per_sample: int


class ContrastiveLoss(nn.Module):
    """Base class of all losses.

    A subclass implements :meth:`_terms` and, if it estimates log-normalizers, :meth:`log_normalizers`. In training mode, call
    the loss once per optimizer step, because each call updates the state. A call in evaluation mode does not change the state.
    A loss is not thread-safe.

    Attributes:
        embed_dim: required embedding dimension. None means any.
        num_samples: size of the data set, which an index must be smaller than. None means that the loss needs no index.
        needs_index: whether ``forward`` needs the samples' index.
        needs_positives: whether ``forward`` needs ``positives``, labels or a mask of equal captions.
        keeps_state: whether a call in training mode changes the state of the loss.
        depends_on_epoch: whether the loss has schedules that depend on the epoch, see :meth:`start_epoch`.
        expects_unit_norm: whether the features must have unit norm.
        uses_logit_scale: whether the value of the loss depends on the model's ``logit_scale``.
        learns_logit_scale: whether the model's ``logit_scale`` gets a gradient. If not, freeze it, because
            DistributedDataParallel fails on a parameter without a gradient.
        given: names of the options that the user gave. The other options have their defaults.
        initial_logit_scale: initial value of OpenCLIP's parameter ``log(1/τ)``. None means the model's value.
        logit_scale_bounds: lower and upper bound of OpenCLIP's parameter ``log(1/τ)`` after an optimizer step.
        initial_logit_bias: initial value of OpenCLIP's ``logit_bias``. None means the model's value.
        uses_logit_bias: whether the model's ``logit_bias`` gets a gradient. If not, freeze it.
        trains_captions: whether ``forward`` also trains the captions of a captioner, such as CoCa.
        trains_captions_only: whether only a captioner's captions are trained, so that the embeddings get no gradient.
        smallest_batch: smallest global batch from which the loss learns. A contrastive loss needs a second pair as a negative.
        views: 1 for images and texts. 2 for two views of each image, passed as ``image_features`` and ``text_features``.
        logit_scale_lr: constant learning rate of ``logit_scale``. None means the encoders' learning rate with its schedule.
        follows_autocast: whether the loss computes under the caller's autocast. If not, it disables autocast.
        accepts_hard_negatives: whether ``forward`` uses ``hard_negative_features``, ``(B_local, d)`` text embeddings.
        reference_dim: embedding dimension of the reference model whose embeddings each call needs; 0 means no such model.
        steers: whether the loss subtracts the reference model's similarities from the model's similarities.
        normalizers_include_positive: whether ``log_normalizers`` estimates ``log((1 + (B−1)·g)/B)``, with the positive pair,
            instead of ``log(ε + g)``.
    """

    embed_dim: int | None = None
    num_samples: int | None = None
    needs_index = False
    needs_positives = False
    keeps_state = False
    depends_on_epoch = False
    expects_unit_norm = True
    uses_logit_scale = True
    smallest_batch = 2
    views = 1
    learns_logit_scale = True
    given: frozenset[str] = frozenset()
    initial_logit_scale: float | None = None
    logit_scale_bounds: tuple[float, float] = (0.0, math.log(100))  # OpenCLIP's, which keep τ in [0.01, 1]
    initial_logit_bias: float | None = None
    uses_logit_bias = False
    trains_captions = False
    trains_captions_only = False
    logit_scale_lr: float | None = None
    follows_autocast = False
    normalizers_include_positive = False
    accepts_hard_negatives = False
    reference_dim = 0
    steers = False
    indices_in_range: Tensor

    def __init__(self) -> None:
        super().__init__()
        self._epoch = HostNumber()
        self._calls = HostNumber()
        self._checks = LoopChecks()
        self.register_buffer("indices_in_range", torch.ones((), dtype=torch.bool), persistent=False)

    @property
    def epoch(self) -> int:
        """The current epoch, counted from 0."""
        return int(self._epoch.get())

    @property
    def calls(self) -> int:
        """Number of calls in training mode."""
        return int(self._calls.get())

    @calls.setter
    def calls(self, value: int) -> None:
        self._calls.set(value)

    def forward(
        self,
        image_features: Tensor,
        text_features: Tensor,
        logit_scale: Tensor,
        logit_bias: Tensor | None = None,
        index: Tensor | None = None,
        output_dict: bool = False,
        **outputs: Any,
    ) -> Tensor | dict[str, Tensor]:
        """Compute the loss of a batch; in training mode also update the state once.

        Args:
            image_features, text_features: ``(B_local, d)``, unit norm, any float dtype. For a loss of two views, pass the
                embeddings of the first and of the second views. If a feature of the global batch is not finite, the result is
                NaN with a gradient of 0, and the state does not change. If no sample has a negative, the result is 0 instead.
            logit_scale: ``1/τ``, one element. A scale that is not finite and positive has the same effect.
            logit_bias: OpenCLIP's ``logit_bias``. It affects only sigmoid losses, because it cancels in a softmax.
            index: ``(B_local,)`` positions of the samples in the data set. Losses without per-sample state ignore it.
            output_dict: whether to return the terms instead of their sum.
            outputs: other outputs of the model, which most losses ignore. A loss with ``equal_captions`` uses ``positives``:
                ``(B_local,)`` int64 labels, which are equal for equal captions, or ``(B_local, k)`` such labels, of which two
                equal samples share at least one. With one process, it also accepts the ``(B_local, B_local)`` bool mask of
                the pairs with equal captions. A loss with ``reference_dim`` uses ``reference``: the reference model's image
                and text embeddings, ``(B_local, reference_dim)`` each.

        Returns:
            The terms by name, including ``contrastive_loss``, or their sum.

        Raises:
            ValueError: an input is missing or has a wrong shape or dtype; there are fewer than 2 samples; an index is outside
                of ``[0, num_samples)`` (on a GPU, raised by the next :meth:`metrics`); on the CPU, the ranks' batch sizes
                differ; in the first two training calls, the scale is not finite and positive.
            RuntimeError: a loss with state is called again in the backward pass (``torch.utils.checkpoint``).

        Warns:
            UserWarning: a probable mistake in the training loop (``contrastive/loop_checks.py``). To find mistakes, the first
                two calls in training mode synchronize with the device.
        """
        if self.training and not torch.compiler.is_compiling() and torch.is_inference_mode_enabled():
            # A loss may train its own network, which is impossible in inference mode or with tensors created in that mode.
            with torch.inference_mode(False), torch.no_grad():
                inputs = (image_features, text_features, logit_scale, logit_bias, index, output_dict, outputs)
                *inputs, named = compat.map_tensors(
                    lambda value: value.clone() if value.is_inference() else value, inputs
                )
                return self.forward(*inputs, **named)
        recomputes = checks.is_in_backward()
        if recomputes and self.training and self.keeps_state:
            raise RuntimeError(
                "the loss was called again in a backward pass, so one batch would update its state twice. Call the loss "
                "outside of torch.utils.checkpoint"
            )
        with contextlib.nullcontext() if self.follows_autocast else checks.without_autocast(image_features):
            checks.check_logit_bias(logit_bias)
            batch = self._batch(image_features, text_features, logit_scale, index, learning=self.training)
            if self.training:
                distributed.check_equal_sizes(image_features)
                self._checks.before_call(self, batch, outputs)
            self._check_hard_negatives(outputs.get(HARD_NEGATIVES), text_features)
            terms = self._terms(batch, {"logit_bias": logit_bias, **outputs})
            self._checks.after_call(terms.values())
        self._calls.add(self.training and not recomputes)
        return terms if output_dict else functools.reduce(torch.add, terms.values())

    def _terms(self, batch: LocalBatch, outputs: dict[str, Any]) -> dict[str, Tensor]:
        """Return the terms of a checked batch, with their autograd graph; in training mode also update the state once."""
        raise NotImplementedError

    def log_normalizers(
        self, image_features: Tensor, text_features: Tensor, logit_scale: Tensor, index: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Estimate the log-normalizers ``α`` of this process's samples from the stored state, without changing it.

        For the arguments, see :meth:`forward`. Collective: all ranks call it with the same number of samples.

        Returns:
            Two tensors ``(B_local,)``, for the images and for the texts, or for the first and for the second views.

        Raises:
            NotImplementedError: The loss has no normalizers.
        """
        raise NotImplementedError(f"{type(self).__name__} has no normalizers")

    def get_extra_state(self) -> Tensor:
        """Return the counters ``(epoch, calls)`` as a tensor, because safetensors stores only tensors."""
        return torch.tensor([self.epoch, self.calls])

    def set_extra_state(self, state: Tensor) -> None:
        epoch, self.calls = state.tolist()
        self._epoch.set(epoch)
        self._checks.epoch_is_known = True

    def start_epoch(self, epoch: int) -> None:
        """Start epoch ``epoch`` (from 0). A second call for the same epoch changes nothing."""
        if epoch < 0:
            raise ValueError(f"start_epoch({epoch}): epochs count from 0")
        self._epoch.set(epoch)
        self._checks.epoch_is_known = True

    @torch.no_grad()
    def finish_logit_scale_step(self, parameter: Tensor, before: Tensor | None = None) -> None:
        """Clamp the model's parameter ``log(1/τ)`` after ``optimizer.step()``; ``before`` is its value before the step."""
        parameter.clamp_(*self.logit_scale_bounds)

    def include_in_bounds(self, logit_scale: float) -> None:
        """Widen the bounds of ``log(1/τ)`` to include the value of a trained model, except for bounds that the user gave."""
        lower, upper = self.logit_scale_bounds
        if "temperature_max" not in self.given:
            lower = min(lower, logit_scale)
        if "temperature_min" not in self.given:
            upper = max(upper, logit_scale)
        if (lower, upper) != self.logit_scale_bounds:
            self.logit_scale_bounds = lower, upper
            if distributed.is_rank0():
                logger.info(
                    f"Temperature bounds: {math.exp(-upper):.4g} to {math.exp(-lower):.4g}, to include the temperature of the "
                    "trained model."
                )

    def metrics(self) -> dict[str, float]:
        """Return metrics of the last call, for the logs. Synchronizes with the device."""
        return {}

    def tables(self) -> dict[str, ShardedTable]:
        """Return the tables of per-sample state, by module name."""
        return {name: module for name, module in self.named_modules() if isinstance(module, ShardedTable)}

    def state_size(self) -> StateSize:
        return StateSize(
            replicated=sum(value.nbytes for value in self.replicated_state().values()),
            per_sample=sum(table.nbytes for table in self.tables().values()),
        )

    def replicated_state(self) -> dict[str, Any]:
        """Return ``state_dict()`` without the tables: the part that is equal in every process."""
        with exclude_tables(self.tables().values()):
            return self.state_dict()

    def load_replicated_state(self, state: dict[str, Any]) -> None:
        """Restore a :meth:`replicated_state`. The tables stay unchanged."""
        with exclude_tables(self.tables().values()):
            self.load_state_dict(state)

    def restore_state(
        self, replicated: dict[str, Any], tables: Mapping[str, Sequence[np.ndarray]], source: object
    ) -> None:
        """Load a :meth:`replicated_state`. Load this rank's shards of the tables from ``tables``, the shards of all ranks.

        Raise UsageError, with ``source`` in the message, if the state is from a loss with different options or data.
        """
        own = self.tables()
        if tables.keys() != own.keys():
            raise UsageError(
                f"{source} has per-sample state of {sorted(tables)}, expected {sorted(own)}. Resume with the options of the "
                "saved run"
            )
        if any(part.dtype == np.float64 for parts in tables.values() for part in parts):
            self.double()
        try:
            self.load_replicated_state(replicated)
        except (RuntimeError, ValueError) as error:
            raise UsageError(
                f"{source} has the state of a loss with different options ({one_line(error)}). Resume with the options of "
                "the saved run"
            ) from error
        for name, table in own.items():
            restore_table(table, tables[name], source)

    def model_head(self) -> nn.Module | None:
        """Return the modules of the loss that are part of the trained model, or None (``openclip_ext/losses/heads.py``).

        The training loop must pass their parameters to the optimizer, average the gradients over the processes, and save the
        modules with the model.
        """
        return None

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **options: Any) -> Any:
        """Restore a state like ``nn.Module.load_state_dict``. If it contains float64, first convert the loss to float64."""
        if any(isinstance(value, Tensor) and value.dtype == torch.float64 for value in state_dict.values()):
            self.double()
        return super().load_state_dict(state_dict, *args, **options)

    def _follow(self, features: Tensor) -> torch.dtype:
        """Move the state to the features' device and to the widest dtype of features, state and float32; return the dtype."""
        state = [value for value in (*self.parameters(), *self.buffers()) if value.is_floating_point()]
        dtype = torch.promote_types(features.dtype, torch.float32)
        for value in state:
            dtype = torch.promote_types(dtype, value.dtype)
        if self.indices_in_range.device != features.device or any(value.dtype != dtype for value in state):
            self.to(device=features.device, dtype=dtype)
        return dtype

    def _batch(
        self,
        image_features: Tensor,
        text_features: Tensor,
        logit_scale: Tensor | float,
        index: Tensor | None,
        learning: bool = False,
    ) -> LocalBatch:
        """Return the checked inputs; move the state of the loss to their device and to the dtype of the computation."""
        checks.check_features(image_features, text_features, self.embed_dim)
        index = self._in_range(checks.check_index(index, image_features)) if self.needs_index else None
        return LocalBatch(
            image_features,
            text_features,
            checks.check_logit_scale(logit_scale, image_features),
            index,
            dtype=self._follow(image_features),
            epoch=self._epoch.get(),
            call=self._calls.get(),
            learning=learning,
        )

    def _check_hard_negatives(self, hard_negatives: Tensor | None, text_features: Tensor) -> None:
        if hard_negatives is None:
            return
        if not self.accepts_hard_negatives:
            raise ValueError(
                f"{HARD_NEGATIVES}: {type(self).__name__} does not use hard negatives with these options: omit them, or "
                "use another loss (openclip needs gather_with_grad if it has local_loss)"
            )
        if hard_negatives.shape != text_features.shape:
            raise ValueError(
                f"{HARD_NEGATIVES}: expected the shape of text_features, {tuple(text_features.shape)}, found "
                f"{tuple(hard_negatives.shape)}"
            )

    def _in_range(self, index: Tensor) -> Tensor:
        """On the CPU, raise ValueError for an index out of range. On other devices, record this; replace the index by −1."""
        assert self.num_samples is not None, "set in every loss that needs an index"
        in_range = index.clamp(0, self.num_samples - 1) == index
        if not index.is_cpu or torch.compiler.is_compiling():
            self.indices_in_range = self.indices_in_range.to(index.device) & in_range.all()
            return torch.where(in_range, index, -1)
        if not in_range.all():
            raise ValueError(
                f"index {index[~in_range].tolist()[:5]}: expected 0 <= index < num_samples={self.num_samples}. Create the "
                "loss with num_samples= the size of this data set"
            )
        return index

    def _raise_if_out_of_range(self) -> None:
        if not self.indices_in_range:
            self.indices_in_range.fill_(True)
            raise ValueError(
                f"an index was outside of [0, {self.num_samples}) and its sample was masked. Create the loss with "
                "num_samples= the size of this data set"
            )
