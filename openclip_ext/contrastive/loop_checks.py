"""Checks for mistakes of a training loop that change the numbers without raising an error.

Values are read in the first calls only: reading waits for the device.
"""

import inspect
import math
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from openclip_ext import distributed
from openclip_ext.contrastive.batch import LocalBatch

CHECKED_CALLS = 2
# Half-precision features differ from length 1 by less.
_TOLERANCE = 0.05
# The largest value of OpenCLIP's parameter log(1/τ). Its exponential is rarely so small: it starts at 10 or 14.3.
_LARGEST_LOG_SCALE = math.log(100)
# Nodes of the graph to look at for a parameter.
_SEARCHED_NODES = 1000
# A smaller batch could repeat a sample by chance.
_MIN_SAMPLES = 4
# An epoch that has seen the data set so many times was forgotten, not just rounded up.
_PASSES_IN_AN_EPOCH = 2
_CALL_IT = "Call loss.start_epoch(epoch) at the start of each epoch, from 0"


@dataclass
class _Call:
    """A call in training mode.

    Attributes:
        parameter: what identifies a parameter of the model and its value; None if the graph leads to none.
        has_graph: whether the result can be differentiated.
        backward_ran: whether it was.
    """

    parameter: tuple[int, int, float] | None
    has_graph: bool = False
    backward_ran: bool = False


class LoopChecks:
    """What a loss has noticed of the loop that calls it. Not part of its state.

    Attributes:
        epoch_is_known: whether the loop, or a restored state, has said which epoch it is.
    """

    def __init__(self) -> None:
        self.epoch_is_known = False
        self._epoch: int | None = None
        self._samples = 0
        self._previous: _Call | None = None
        self._warned: set[str] = set()

    def check_outputs(self, unused: Iterable[str], loss: str) -> None:
        """Warn once about keyword arguments that the loss does not use."""
        if names := ", ".join(f"{name}=" for name in sorted(unused)):
            self._warn_once(
                "outputs",
                f"{loss} does not use {names}: the loss is the same without. Leave them out, or choose a loss that uses them",
            )

    def check_processes(self) -> None:
        """Warn once if other processes were started, too, and there is no process group to reach them."""
        if processes := distributed.unconnected_processes():
            self._warn_once(
                "processes",
                f"{processes} processes were started (WORLD_SIZE), but torch.distributed.init_process_group was not called: "
                "each contrasts its own samples only",
            )

    def check_epoch(self, epoch: int, samples: int, num_samples: int | None) -> None:
        """Warn once if a loss whose schedules follow the epoch is not told about it.

        Args:
            epoch: the current one.
            samples: of this call, on all processes.
            num_samples: size of the data set, if known.
        """
        if not self.epoch_is_known:
            self._warn_once(
                "epoch",
                "start_epoch() was not called before the first training step. Schedules of this loss follow the epoch, and "
                f"stay as they are at epoch 0. {_CALL_IT}",
            )
        self._samples = samples if epoch != self._epoch else self._samples + samples
        self._epoch = epoch
        if num_samples is not None and self.epoch_is_known and self._samples > _PASSES_IN_AN_EPOCH * num_samples:
            self._warn_once(
                "length",
                f"epoch {epoch} has seen {self._samples} samples, and the data set has num_samples={num_samples}. Schedules "
                f"of this loss follow the epoch. {_CALL_IT}",
            )

    def check_gradients(self) -> None:
        """Warn once of a call in training mode whose result can have no gradient."""
        if not torch.is_grad_enabled():
            self._warn_once(
                "no_grad",
                "the loss was called in training mode under torch.no_grad(). Such a call updates its state, as one optimizer "
                "step. To look at its value, call it after loss.eval(), and go on after loss.train()",
            )

    def check_values(
        self, batch: LocalBatch, unit_norm: bool, uses_logit_scale: bool, initial_logit_scale: float | None
    ) -> None:
        """Warn about features of another length than 1, and about a scale that looks like its logarithm.

        Args:
            batch: the inputs of the call.
            unit_norm: whether the loss expects features of length 1.
            uses_logit_scale: whether the loss depends on the scale.
            initial_logit_scale: logarithm of the scale that the loss asks for at the start, if it does.

        Raises:
            ValueError: the scale is not finite and positive.
        """
        lengths = torch.linalg.vector_norm(torch.stack([batch.image, batch.text]).detach().float(), dim=2)
        lengths = torch.where(batch.finite, lengths, 1)
        values = torch.stack([lengths.min(), lengths.max(), batch.logit_scale.detach().float()])
        shortest, longest, scale = values.tolist()
        if not 0 < scale < math.inf:
            raise ValueError(
                f"logit_scale: found {scale:.4g}, expected a finite positive number, 1/temperature. OpenCLIP's models keep "
                "its logarithm: pass model.logit_scale.exp()"
            )
        is_asked_for = initial_logit_scale is not None and math.isclose(
            scale, math.exp(initial_logit_scale), rel_tol=_TOLERANCE
        )
        if uses_logit_scale and scale <= _LARGEST_LOG_SCALE and not is_asked_for:
            self._warn_once(
                "scale",
                f"logit_scale: found {scale:.4g}, a temperature of {1 / scale:.2g}. Expected 1/temperature, such as 14.3 at "
                "the start of training. If this is the logarithm that OpenCLIP's models keep, pass model.logit_scale.exp()",
            )
        if unit_norm and max(longest - 1, 1 - shortest) > _TOLERANCE:
            self._warn_once(
                "length of features",
                f"image_features, text_features: found rows of length {shortest:.4g} to {longest:.4g}, expected 1. Otherwise "
                "the loss can become huge. Pass torch.nn.functional.normalize(features, dim=-1)",
            )

    def check_start(self, scale: float, expected: float) -> None:
        """Warn once if the model's scale does not start where the loss was asked to start it."""
        if not math.isclose(scale, expected, rel_tol=_TOLERANCE):
            self._warn_once(
                "start",
                f"logit_scale: found {scale:.4g}, and the loss was created with temperature={1 / expected:.4g}, which has no "
                "effect on the model: start its parameter at loss.initial_logit_scale. To continue a run, restore the loss's "
                "state_dict()",
            )

    def check_index(self, index: Tensor) -> None:
        """Warn once if more than half of a batch has one index."""
        usual = index.median()  # if there is such an index
        count, position = torch.stack([(index == usual).sum(), usual]).tolist()
        if len(index) >= _MIN_SAMPLES and 2 * count > len(index):
            self._warn_once(
                "index",
                f"index: {count} of {len(index)} samples of the batch have the index {position}, and share their state. Pass "
                "each sample's position in the data set",
            )

    def check_captions(self, labels: Tensor) -> None:
        """Warn once if all captions of a batch are equal."""
        if bool((labels == labels[0]).all()):
            self._warn_once(
                "captions",
                f"positives: all {len(labels)} captions of the batch are equal, so no sample has a negative and nothing is "
                "learned. Pass labels that differ where captions do",
            )

    def begin_call(self, *features: Tensor) -> None:
        """Warn if no optimizer step came between the previous call and this one.

        Args:
            features: with their graph, which leads to the model's parameters.
        """
        previous, parameter = self._previous, _find_parameter(features)
        self._previous = _Call(None if parameter is None else _identity(parameter))
        if previous is None or not previous.has_graph:
            return
        unchanged = previous.parameter is not None and previous.parameter == self._previous.parameter
        if not previous.backward_ran:
            found = "called again in training mode before the backward pass of the previous call"
        elif unchanged and parameter is not None and parameter.grad is not None:
            found = "called twice in training mode without an optimizer step between the calls"
        else:
            return
        self._warn_once(
            "step",
            f"the loss was {found}. Each such call updates its state, as one optimizer step. To accumulate gradients, call it "
            "once on the features of all micro-batches; to look at its value, call it after loss.eval()",
        )

    def finish_call(self, terms: Iterable[Tensor]) -> None:
        """Notice when the backward pass of this call runs."""
        call = self._previous
        assert call is not None, "begin_call comes first"

        def note(gradient: Tensor) -> None:
            call.backward_ran = True

        for term in terms:
            if term.requires_grad:
                call.has_graph = True
                term.register_hook(note)

    def _warn_once(self, kind: str, message: str) -> None:
        if kind not in self._warned:
            self._warned.add(kind)
            warnings.warn(message, stacklevel=_frames_to_the_caller())


def can_read_values(tensor: Tensor) -> bool:
    """Return whether a tensor has values that Python may look at now: not while compiling, capturing, or without any."""
    if torch.compiler.is_compiling() or tensor.is_meta or type(tensor) not in (Tensor, nn.Parameter):
        return False
    return not (tensor.is_cuda and torch.cuda.is_current_stream_capturing())


def _find_parameter(outputs: Iterable[Tensor]) -> nn.Parameter | None:
    """A parameter that the graph of one of the tensors leads to, or None."""
    for output in outputs:
        if isinstance(output, nn.Parameter):
            return output
        stack: list[Any] = [output.grad_fn]
        seen: set[Any] = set()
        while stack and len(seen) < _SEARCHED_NODES:
            node = stack.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            variable = getattr(node, "variable", None)
            if isinstance(variable, nn.Parameter):
                return variable
            stack.extend(following for following, _ in node.next_functions)
    return None


def _identity(parameter: nn.Parameter) -> tuple[int, int, float]:
    """Changes with every optimizer step, in place or not."""
    return id(parameter), parameter._version, parameter.detach().double().sum().item()


def _frames_to_the_caller() -> int:
    """Return the ``stacklevel`` of the first caller outside of this package and of torch."""
    frame, level = inspect.currentframe(), 0
    while frame is not None and frame.f_globals.get("__name__", "").split(".")[0] in ("openclip_ext", "torch"):
        frame, level = frame.f_back, level + 1
    return level
