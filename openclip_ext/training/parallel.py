"""The model on several processes: a replica on each (DDP), or its parameters spread over them (FSDP2, ``--fsdp``).

The rest of the training knows neither. Here is what differs: clipping gradients, the optimizer's state, the logit scale, and
a whole model to evaluate.
"""

import contextlib
import copy
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from openclip_ext import compat, distributed
from openclip_ext.cli.errors import UsageError
from openclip_ext.training.config import ParallelConfig

# Optimizers whose step of a number depends on no other number, so that parts of parameters can be stepped.
SHARDABLE_OPTIMIZERS = ("adamw", "timm/adamw", "timm/sgd", "timm/momentum", "timm/lion")
_LOOKAHEAD = "lookahead_"


def distribute(model: nn.Module, config: ParallelConfig, device: torch.device, keep_whole: bool) -> nn.Module:
    """Wrap the model for several processes; for ``keep_whole`` see :class:`ShardedDataParallel`."""
    if distributed.world_size() == 1:
        return model
    if config.sync_batchnorm:
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    if config.fsdp:
        return ShardedDataParallel(model, device, config, keep_whole)
    return replicate(model, device, static_graph=config.static_graph)


def compiled(model: nn.Module, config: ParallelConfig) -> nn.Module:
    """Compile the model for ``--torchcompile``; a sharded one has compiled its blocks."""
    if not config.compile or isinstance(model, ShardedDataParallel):
        return model
    if config.grad_checkpointing and distributed.world_size() > 1:
        # Dynamo's DDP optimizer does not work together with gradient checkpointing (OpenCLIP does the same).
        torch._dynamo.config.optimize_ddp = False
    result = torch.compile(model)
    assert isinstance(result, nn.Module), "compiling a module gives a module"
    return result


def replicate(model: nn.Module, device: torch.device, static_graph: bool = False) -> nn.Module:
    """Wrap the model in DistributedDataParallel."""
    devices = None if device.type == "cpu" else [device]
    return nn.parallel.DistributedDataParallel(model, device_ids=devices, static_graph=static_graph)


class ShardedDataParallel(nn.Module):
    """A model whose parameters, gradients and optimizer state are spread over the processes (FSDP2).

    It replaces DistributedDataParallel: gradients are the mean over the processes. ``state_dict`` and ``load_state_dict`` are
    the whole model's, under its own names, and all processes must call them.

    Every ``--precision`` computes what it computes with replicas; gradients of 16-bit parameters are averaged in float32.
    FSDP2 cannot shard parameters without dimensions (``logit_scale``), so these get one. Gradients are averaged after each
    micro-batch; otherwise every process would hold whole gradients.

    Args:
        model: sharded in place.
        device: the process's device.
        config: the configuration.
        keep_whole: whether the master keeps a copy on the host to evaluate (see :func:`whole_model`).

    Raises:
        UsageError: parameters of several types, as ``--precision bf16`` and ``fp16`` have.
    """

    def __init__(self, model: nn.Module, device: torch.device, config: ParallelConfig, keep_whole: bool) -> None:
        super().__init__()
        policy = MixedPrecisionPolicy(reduce_dtype=_reduce_dtype(model))
        # In a list, so that it is no submodule.
        self._whole = [copy.deepcopy(model).cpu()] if keep_whole and distributed.is_master() else []
        self._scalars = _give_scalars_a_dimension(model)
        options: dict[str, Any] = {
            "mesh": init_device_mesh(device.type, (distributed.world_size(),)),
            "mp_policy": policy,
        }
        if config.keep_gathered:
            options["reshard_after_forward"] = False
        for block in blocks_of(model):
            if config.compile:
                block.compile()
            fully_shard(block, **options)
        fully_shard(model, **options)
        self.module = model

    def forward(self, *inputs: Any, **named: Any) -> dict[str, Any]:
        """Call the model, and return ``logit_scale`` (and ``logit_bias``) as 0-d tensors, as without sharding.

        Under autocast a vector with one element would make OpenCLIP's losses float32.
        """
        outputs = self.module(*inputs, **named)
        return {name: value.reshape(()) if name in self._scalars else value for name, value in outputs.items()}

    def state_dict(self, *args: Any, **options: Any) -> dict[str, Any]:  # type: ignore[override]
        """Return the whole model's state on the master, in host memory; the other processes get the names only."""
        state = self.module.state_dict(*args, **options)
        return {name: _gathered(value, name in self._scalars) for name, value in state.items()}

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **options: Any) -> Any:
        """Load the whole model's state, which every process must have."""
        own = self.module.state_dict()
        parts = {name: _scattered(value, own[name]) if name in own else value for name, value in state_dict.items()}
        return self.module.load_state_dict(parts, *args, **options)

    def optimizer_state_dict(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Return ``optimizer.state_dict()`` with whole tensors: the same as without sharding."""
        packed = optimizer.state_dict()
        parameters, scalars = _parameters_of(optimizer), self._scalar_parameters()
        state = {
            number: {name: _gathered(value, id(parameters[number]) in scalars) for name, value in values.items()}
            for number, values in packed["state"].items()
        }
        return {**packed, "state": state}

    def load_optimizer_state_dict(self, optimizer: torch.optim.Optimizer, packed: dict[str, Any]) -> None:
        """Load the state of :meth:`optimizer_state_dict`, or of an optimizer of a whole model."""
        parameters = _parameters_of(optimizer)
        state = {
            number: {
                # ``step`` is one number for the whole parameter.
                name: value if name == "step" else _scattered(value, parameters[number])
                for name, value in values.items()
            }
            for number, values in packed["state"].items()
        }
        optimizer.load_state_dict({**packed, "state": state})

    def _scalar_parameters(self) -> set[int]:
        return {id(parameter) for name, parameter in self.module.named_parameters() if name in self._scalars}

    @contextlib.contextmanager
    def whole(self, needed: bool) -> Iterator[nn.Module | None]:
        """Do what :func:`whole_model` documents."""
        if not distributed.broadcast_object(needed):
            yield None
            return
        state = self.state_dict()
        if not distributed.is_master():
            yield None
            return
        if not self._whole:
            raise RuntimeError("no copy of the model was kept to evaluate: create it with keep_whole=True")
        model = self._whole[0]
        model.load_state_dict(state)
        try:
            yield model.to(next(self.module.parameters()).device)
        finally:
            model.cpu()


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """Return what FSDP2 gathers at a time, inner blocks first: transformer blocks, or stages of a CNN and their blocks."""
    blocks = []
    for stack in model.modules():
        if isinstance(stack, nn.Sequential | nn.ModuleList):
            layers = list(stack)
            if len({type(layer) for layer in layers}) == 1 and next(layers[0].children(), None) is not None:
                blocks += layers
    return blocks[::-1]


def check_shardable(optimizer: str, has_scaler: bool, has_head: bool) -> None:
    """Raise UsageError if ``--fsdp`` works neither with the optimizer nor with a gradient scaler and a loss with modules."""
    if optimizer.replace(_LOOKAHEAD, "") not in SHARDABLE_OPTIMIZERS:
        raise UsageError(
            f"--fsdp steps parts of parameters, which --opt {optimizer} is not known to allow. Known: "
            f"{', '.join(SHARDABLE_OPTIMIZERS)}, and timm/{_LOOKAHEAD}NAME of these. Or leave out --fsdp"
        )
    if has_scaler and has_head:
        raise UsageError(
            "--fsdp with --precision amp: torch's GradScaler cannot scale sharded parameters (the model's) and whole ones "
            "(those of the loss) together. Use --precision amp_bf16, or leave out --fsdp"
        )


# --- for any model, sharded or not -----------------------------------------------------------------------------------


def optimizer_state_dict(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return ``optimizer.state_dict()``, with whole tensors on the master. All processes must call it."""
    if isinstance(model, ShardedDataParallel):
        return model.optimizer_state_dict(optimizer)
    return optimizer.state_dict()


def load_optimizer_state_dict(model: nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Load the state of :func:`optimizer_state_dict`, whatever model it was for."""
    if isinstance(model, ShardedDataParallel):
        model.load_optimizer_state_dict(optimizer, state)
    else:
        optimizer.load_state_dict(state)


def whole_model(model: nn.Module, needed: bool) -> contextlib.AbstractContextManager[nn.Module | None]:
    """Return a context with the unwrapped model, or a copy of a sharded one, on the master, and None on other processes.

    All processes must enter it. It is None on the master, too, unless the model is ``needed`` there to evaluate.
    """
    if isinstance(model, ShardedDataParallel):
        return model.whole(needed)
    return contextlib.nullcontext(compat.unwrap(model) if needed and distributed.is_master() else None)


def unwrap(model: nn.Module) -> nn.Module:
    """Return the model itself, out of its wrappers; the parameters of a sharded one are this process's parts."""
    model = compat.unwrap(model)
    return model.module if isinstance(model, ShardedDataParallel) else model


def local(tensor: Tensor) -> Tensor:
    """Return this process's part of a parameter or gradient, in the same memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@torch.no_grad()
def clip_grad_norm_(parameters: Iterable[nn.Parameter], max_norm: float) -> None:
    """Clip as ``torch.nn.utils.clip_grad_norm_``, even if only some gradients are spread over the processes."""
    parameters = list(parameters)
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    spread = [gradient.to_local() for gradient in gradients if isinstance(gradient, DTensor)]
    if not spread:
        nn.utils.clip_grad_norm_(parameters, max_norm, norm_type=2.0)
        return
    whole = [gradient for gradient in gradients if not isinstance(gradient, DTensor)]
    square = distributed.all_reduce_sum(nn.utils.get_total_norm(spread).double().square())
    if whole:
        square += nn.utils.get_total_norm(whole).double().square()
    factor = (max_norm / (square.sqrt() + 1e-6)).clamp(max=1.0)
    for gradient in [*spread, *whole]:
        gradient.mul_(factor.to(gradient.dtype))


@torch.no_grad()
def all_finite(parameters: Iterable[Tensor]) -> bool:
    """Return whether all parameters are finite on all processes, which must all call this. Waits for the device."""
    finite = torch.stack([torch.isfinite(local(parameter)).all() for parameter in parameters]).all()
    return not distributed.any_rank(int(not finite))


# --- inside ----------------------------------------------------------------------------------------------------------


def _reduce_dtype(model: nn.Module) -> torch.dtype | None:
    types = {parameter.dtype for parameter in model.parameters()}
    if len(types) > 1:
        raise UsageError(
            f"--fsdp needs parameters of one type, the model's are {', '.join(sorted(str(item) for item in types))}: use "
            "--precision amp_bf16 or pure_bf16"
        )
    return torch.float32 if types & {torch.float16, torch.bfloat16} else None


def _give_scalars_a_dimension(model: nn.Module) -> set[str]:
    """Replace 0-d parameters by one-element vectors; returns their names."""
    names = {name for name, parameter in model.named_parameters() if parameter.ndim == 0}
    for name in names:
        path, _, attribute = name.rpartition(".")
        owner = model.get_submodule(path)
        scalar = getattr(owner, attribute)
        setattr(owner, attribute, nn.Parameter(scalar.detach().reshape(1), requires_grad=scalar.requires_grad))
    return names


def _gathered(value: Any, is_scalar: bool) -> Any:
    """Return the whole tensor on the master and None on other processes; return other values as they are."""
    if not isinstance(value, DTensor):
        return value
    whole = value.full_tensor()
    if not distributed.is_master():
        return None
    return whole.reshape(()).cpu() if is_scalar else whole.cpu()


def _scattered(value: Any, like: Tensor) -> Any:
    """Return this process's part of a whole tensor, spread as ``like`` is; return other values as they are."""
    if not isinstance(like, DTensor) or not isinstance(value, Tensor):
        return value
    if value.shape != like.shape and (value.ndim > 0 or like.numel() > 1):
        return value
    whole = value.to(like.device, like.dtype).reshape(like.shape)
    return distribute_tensor(whole, like.device_mesh, like.placements)


def _parameters_of(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    """Return the parameters in the order in which ``optimizer.state_dict()`` numbers them."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]
