"""What the trainer, or anybody's loop, may expect of every loss."""

import contextlib
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from openclip_ext import distributed
from openclip_ext.contrastive.batch import LocalBatch
from openclip_ext.contrastive.nonfinite import NonfiniteLog
from openclip_ext.state.sharded_table import ShardedTable, kept_apart, sharded_key

# OpenCLIP keeps the temperature in [0.01, 1].
_OPENCLIP_BOUNDS = (0.0, math.log(100))


@dataclass(frozen=True)
class StateSize:
    """Bytes that a loss keeps in one process.

    Attributes:
        replicated: networks, prototypes, their optimizers: the same in every process, where the model is.
        with_model: tables of per-sample state that are where the model is, this process's part.
        on_host: tables in the host's memory or in a memory-mapped file, this process's part.
    """

    replicated: int
    with_model: int
    on_host: int


class ContrastiveLoss(nn.Module):
    """Base of all losses.

    A subclass gives :meth:`_terms`, and :meth:`log_normalizers` where it estimates any. One call in training mode is one
    optimizer step: state is updated in it, and is not in evaluation mode.

    Attributes:
        embed_dim: width that the features must have; None: any.
        needs_index: whether ``forward`` needs the samples' index.
        learns_logit_scale: whether the model's ``logit_scale`` gets a gradient; if not, freeze it.
        initial_logit_scale: start value of OpenCLIP's parameter ``log(1/τ)``; None: leave the model's.
        initial_logit_bias: start value of OpenCLIP's ``logit_bias``; None: the model needs none.
        views: 2 for a loss of two views of each image: they take the places of ``image_features`` and ``text_features``.
        logit_scale_lr: learning rate of that parameter, without schedule; None: that of the encoders, with its schedule.
        follows_autocast: whether it computes as the caller's autocast says, instead of in the precision of the features.
        normalizers_include_positive: what ``log_normalizers`` estimates: False: ``log(ε + g)``; True: the positive pair is
            in it, ``log((1 + (B−1)·g)/B)`` (AmorLIP).
    """

    embed_dim: int | None = None
    needs_index = False
    views = 1
    learns_logit_scale = True
    initial_logit_scale: float | None = None
    initial_logit_bias: float | None = None
    logit_scale_lr: float | None = None
    follows_autocast = False
    normalizers_include_positive = False

    def __init__(self) -> None:
        super().__init__()
        self.epoch = 0
        self.calls = 0
        self.nonfinite = NonfiniteLog()

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
        """Loss of a batch; in training mode also one update of the state.

        Args:
            image_features, text_features: ``(B_local, d)``, unit norm, any floating-point type; for a loss of two views the
                embeddings of the first and of the second views. Samples with a non-finite feature are left out, without
                waiting for the device, and reported by :meth:`pop_nonfinite` (OpenCLIP's own losses only report them).
            logit_scale: 0-d or one element, ``1/τ``. If not finite, the loss is 0 and nothing changes.
            logit_bias: for SigLIP; it cancels in a softmax, and other losses ignore it.
            index: ``(B_local,)`` positions of the samples in the data set; ignored by losses that need none.
            output_dict: return the terms.
            outputs: other outputs of the model; what a loss has no use for is ignored.

        Returns:
            The terms by name, ``contrastive_loss`` among them, or their sum.

        Raises:
            ValueError: wrong shapes or types; too few samples to contrast; an index that is missing, or (at once on the
                CPU, at the next :meth:`metrics` or :meth:`pop_nonfinite` on other devices) outside of ``[0, num_samples)``.
        """
        with contextlib.nullcontext() if self.follows_autocast else without_autocast(image_features):
            batch = self._batch(image_features, text_features, logit_scale, index, learning=self.training)
            terms = self._terms(batch, {"logit_bias": logit_bias, **outputs})
            self._note_nonfinite(batch, index)
        self.calls += self.training
        return terms if output_dict else sum(terms.values())

    def _terms(self, batch: LocalBatch, outputs: dict[str, Any]) -> dict[str, Tensor]:
        """The loss's terms, with their graph; in training mode also one update of the state.

        Args:
            batch: what :meth:`forward` was given, checked.
            outputs: the model's other outputs.
        """
        raise NotImplementedError

    def log_normalizers(
        self, image_features: Tensor, text_features: Tensor, logit_scale: Tensor, index: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Estimated log-normalizers ``α`` of this process's samples, from the state as it is; nothing changes.

        With several processes all of them must call it, with equally many samples.

        Args:
            image_features, text_features, logit_scale, index: as for :meth:`forward`.

        Returns:
            ``(B_local,)`` for the images and for the texts, or for the first and the second views.

        Raises:
            NotImplementedError: the loss estimates none.
        """
        raise NotImplementedError(f"{type(self).__name__} estimates no normalizer")

    def get_extra_state(self) -> dict[str, Any]:
        """Counters that decide what the host does; part of ``state_dict``."""
        return {"epoch": self.epoch, "calls": self.calls}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """Restore what :meth:`get_extra_state` gave."""
        self.epoch = state["epoch"]
        self.calls = state["calls"]

    def start_epoch(self, epoch: int) -> None:
        """Begin epoch ``epoch`` (from 0). Calling it again for the same epoch changes nothing."""
        self.epoch = epoch

    @torch.no_grad()
    def finish_logit_scale_step(self, parameter: Tensor, before: Tensor | None = None) -> None:
        """Bound the model's ``logit_scale`` parameter; to be called after ``optimizer.step()``.

        Args:
            parameter: OpenCLIP's parameter ``log(1/τ)``, changed in place.
            before: its value before the step, or None if it was not kept.
        """
        parameter.clamp_(*_OPENCLIP_BOUNDS)

    def metrics(self) -> dict[str, float]:
        """Numbers for the logs, of the last call. Waits for the device."""
        return {}

    def pop_nonfinite(self) -> list[tuple[int, list[int]]]:
        """``(call, indices)`` of this process's samples left out since the last look, because they were not finite.

        The first call is number 0. Samples that came without an index are named by their position in the batch. An entry
        without indices: ``logit_scale`` was not finite. Waits for the device.

        Raises:
            ValueError: a step was for other samples than :meth:`prefetch` had been told.
        """
        for name, table in self.tables().items():
            if bool(table.foreign):
                table.foreign.zero_()
                raise ValueError(
                    f"{name}: a step came with another index than prefetch() had been given, and its samples counted as new: "
                    "give prefetch() the index of the next call in training mode, or do not call it"
                )
        return self.nonfinite.pop()

    def prefetch(self, index: Tensor) -> None:
        """Begin to read the per-sample state of the batch that the next call in training mode will be for.

        Optional. Of use where that state is on the host and the model on a GPU, or the state in a file: reading it then goes
        on while the encoders compute. All processes must call it, or none.

        Args:
            index: ``(B_local,)`` as it will be given to :meth:`forward`, on the CPU. Does nothing if it is on another device.
        """
        tables = [table for table in self.tables().values() if table.host is not None]
        if tables and index.is_cpu:
            gathered = distributed.all_gather_on_host(index.to(torch.int64))
            for table in tables:
                table.prefetch(gathered)

    def tables(self) -> dict[str, ShardedTable]:
        """Tables of per-sample state, by their place in the loss."""
        return {name: module for name, module in self.named_modules() if isinstance(module, ShardedTable)}

    def state_size(self) -> StateSize:
        """What the loss's state takes in this process."""
        tables = self.tables().values()
        on_host = sum(table.nbytes for table in tables if table.host is not None)
        return StateSize(
            replicated=sum(leaf.nbytes for leaf in tree_leaves(self.replicated_state()) if isinstance(leaf, Tensor)),
            with_model=sum(table.nbytes for table in tables) - on_host,
            on_host=on_host,
        )

    def replicated_state(self) -> dict[str, Any]:
        """``state_dict()`` without the tables: what is the same in every process."""
        with kept_apart(self.tables().values()):
            return self.state_dict()

    def load_replicated_state(self, state: dict[str, Any]) -> None:
        """Restore what :meth:`replicated_state` gave; the tables stay as they are."""
        with kept_apart(self.tables().values()):
            self.load_state_dict(state)

    def sharded_state_keys(self) -> set[str]:
        """Keys of ``state_dict()`` that hold this process's part of a table; all others are the same everywhere."""
        return {sharded_key(name) for name in self.tables()}

    def model_head(self) -> nn.Module | None:
        """Modules of the loss that are part of the trained model, or None.

        Their parameters belong into the training's optimizer, with gradients averaged over the processes like the
        model's, and a checkpoint's model file holds them. They have ``kind`` and ``config``, from which they can be built
        again, and ``evaluated``: if so, evaluation goes through their ``image`` and ``text`` (``openclip_ext/heads.py``).
        """
        return None

    def load_state_dict(self, state_dict: dict[str, Any], *args: Any, **options: Any) -> Any:
        """As ``nn.Module``'s; the loss takes on the precision of the state."""
        if any(isinstance(value, Tensor) and value.dtype == torch.float64 for value in state_dict.values()):
            self.double()
        return super().load_state_dict(state_dict, *args, **options)

    def _follow(self, features: Tensor) -> torch.dtype:
        """Bring the state to the input's device and precision: at least float32, and never below its own."""
        state = [value for value in (*self.parameters(), *self.buffers()) if value.is_floating_point()]
        dtype = torch.promote_types(features.dtype, torch.float32)
        for value in state:
            dtype = torch.promote_types(dtype, value.dtype)
        if self.nonfinite.entries.device != features.device or any(value.dtype != dtype for value in state):
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
        """What the caller gave, checked; the state follows its device and precision."""
        check_features(image_features, text_features, self.embed_dim)
        scale = check_logit_scale(logit_scale, image_features)
        dtype = self._follow(image_features)
        state = (self.epoch, self.calls, learning, self.views)
        return LocalBatch(image_features, text_features, scale, index, dtype, *state)

    def _note_nonfinite(self, batch: LocalBatch, index: Tensor | None) -> None:
        finite = torch.isfinite(batch.image.detach()).all(dim=1) & torch.isfinite(batch.text.detach()).all(dim=1)
        named = isinstance(index, Tensor) and index.shape == finite.shape and not index.is_floating_point()
        names = index.to(finite.device, torch.int64) if named else torch.arange(len(finite), device=finite.device)
        self.nonfinite.add(self.calls, names, ~finite, ~torch.isfinite(batch.logit_scale.detach()))


def without_autocast(tensor: Tensor) -> contextlib.AbstractContextManager[Any]:
    """Compute in the precision of the tensors, whatever the caller's autocast says."""
    device = tensor.device.type
    if not torch.amp.is_autocast_available(device):
        return contextlib.nullcontext()
    return torch.autocast(device, enabled=False)


def check_features(image_features: Tensor, text_features: Tensor, embed_dim: int | None = None) -> None:
    """Raise ValueError unless the features are two floating-point ``(B_local, d)`` of the same shape and type.

    Args:
        image_features, text_features: what was given.
        embed_dim: the expected ``d``, where the loss's state fixes it.
    """
    shapes = tuple(image_features.shape), tuple(text_features.shape)
    if image_features.ndim != 2 or shapes[0] != shapes[1]:
        raise ValueError(
            f"image and text features: expected two of shape (batch, width), found {shapes[0]} and {shapes[1]}"
        )
    if embed_dim is not None and shapes[0][1] != embed_dim:
        raise ValueError(
            f"the features have width {shapes[0][1]}, the loss was created with embed_dim={embed_dim}: pass the model's"
        )
    for name, features in (("image", image_features), ("text", text_features)):
        if not features.is_floating_point():
            raise ValueError(f"{name} features: expected a floating-point type, found {features.dtype}")


def check_logit_scale(logit_scale: Tensor | float, like: Tensor) -> Tensor:
    """The logit scale as a 0-d tensor; ValueError if it has more than one element."""
    if not isinstance(logit_scale, Tensor):
        return torch.as_tensor(logit_scale, dtype=torch.promote_types(like.dtype, torch.float32), device=like.device)
    if logit_scale.numel() != 1:
        raise ValueError(
            f"logit_scale: expected one number (the model's, exp applied), found {tuple(logit_scale.shape)}"
        )
    return logit_scale.reshape(())
