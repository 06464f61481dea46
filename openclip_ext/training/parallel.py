"""The model on several processes: a replica on each (DDP), or its parameters spread over them (FSDP2, ``--fsdp``).

The rest of the training knows neither. It calls the model, asks it for its ``state_dict`` on all processes, and comes
here for what differs: clipping gradients, the optimizer's state, the logit scale, and a whole model to evaluate.
"""

import contextlib
import copy
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from openclip_ext import compat, distributed
from openclip_ext.options import flag
from openclip_ext.training.errors import UsageError

# Optimizers that treat every number of a parameter by itself, so that a part of it can be stepped alone.
SHARDABLE_OPTIMIZERS = ("adamw", "timm/adamw", "timm/sgd", "timm/momentum", "timm/lion")
_LOOKAHEAD = "lookahead_"


@dataclass(frozen=True)
class ParallelConfig:
    """How the model lies on the processes, and whether it is compiled.

    Attributes:
        static_graph: of DDP.
        sync_batchnorm: BatchNorm's statistics over all processes.
        compile: ``torch.compile``.
        grad_checkpointing: whether the model recomputes activations, which compiling must know.
    """

    fsdp: bool = flag(
        False,
        "spread parameters, gradients and optimizer state over the processes (FSDP2) instead of replicating them (DDP)",
    )
    keep_gathered: bool = flag(
        False,
        "with --fsdp: keep the gathered parameters from forward to backward; less communication, more memory",
        dest="fsdp_no_reshard_after_forward",
        needs="fsdp",
    )
    static_graph: bool = flag(False, dest="ddp_static_graph")
    sync_batchnorm: bool = flag(False, dest="use_bn_sync")
    compile: bool = flag(False, dest="torchcompile")
    grad_checkpointing: bool = flag(False)


def distribute(model: nn.Module, config: ParallelConfig, device: torch.device, keep_whole: bool) -> nn.Module:
    """Wrap the model for several processes; with one process the model itself.

    Args:
        model: on ``device``.
        config: how.
        device: the process's.
        keep_whole: with FSDP, see :class:`ShardedDataParallel`.

    Raises:
        UsageError: parameters of several types with FSDP.
    """
    if distributed.world_size() == 1:
        return model
    if config.sync_batchnorm:
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    if config.fsdp:
        return ShardedDataParallel(model, device, config, keep_whole)
    return replicate(model, device, static_graph=config.static_graph)


def compiled(model: nn.Module, config: ParallelConfig) -> nn.Module:
    """Compile the model if ``--torchcompile`` asks for it; a sharded one has compiled its blocks."""
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

    It takes DistributedDataParallel's place: gradients are the mean over the processes. ``state_dict`` and
    ``load_state_dict`` are the whole model's, under its own names, and all processes must call them.

    Autocast is used as without sharding, so that every ``--precision`` computes what it computes with replicas; gradients
    of 16-bit parameters are averaged in float32. Parameters without dimensions (``logit_scale``), which FSDP2 cannot
    shard, have one dimension meanwhile. Gradients of micro-batches are averaged one by one: to hold them back would keep
    whole gradients on every process.

    Args:
        model: sharded in place.
        device: the process's.
        config: whether to compile each block, and to keep it gathered from forward to backward pass.
        keep_whole: on the master, keep a copy on the host to evaluate (see :func:`whole_model`).

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
        """Call the model, with the 0-d ``logit_scale`` (and ``logit_bias``) that it has without sharding.

        A one-element vector takes part in type promotion: under autocast it would make OpenCLIP's losses float32.
        """
        outputs = self.module(*inputs, **named)
        return {name: value.reshape(()) if name in self._scalars else value for name, value in outputs.items()}

    def state_dict(self, *args: Any, **options: Any) -> dict[str, Any]:  # type: ignore[override]
        """Return the whole model's state on the master, in host memory; the other processes get the names only."""
        state = self.module.state_dict(*args, **options)
        return {name: _gathered(value, name in self._scalars) for name, value in state.items()}

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **options: Any) -> Any:
        """Load the whole model's state, which every process has."""
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
        """Load what :meth:`optimizer_state_dict` or an optimizer of a whole model gave."""
        parameters = _parameters_of(optimizer)
        state = {
            number: {
                # ``step`` counts; it is a number beside a parameter, not one for each of its values.
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
    """Return what FSDP2 gathers at a time: the blocks of every stack of equal ones, inner ones first.

    These are transformer blocks, or stages of a convolutional tower and their blocks.
    """
    blocks = []
    for stack in model.modules():
        if isinstance(stack, nn.Sequential | nn.ModuleList):
            layers = list(stack)
            if len({type(layer) for layer in layers}) == 1 and next(layers[0].children(), None) is not None:
                blocks += layers
    return blocks[::-1]


def check_shardable(optimizer: str, has_scaler: bool, has_head: bool) -> None:
    """Raise UsageError for what ``--fsdp`` cannot do.

    Args:
        optimizer: its full name.
        has_scaler: whether gradients are scaled (``--precision amp``).
        has_head: whether the loss trains modules of its own, which are replicated.
    """
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
    """Return ``optimizer.state_dict()``; of a sharded model with whole tensors on the master. All processes must call it."""
    if isinstance(model, ShardedDataParallel):
        return model.optimizer_state_dict(optimizer)
    return optimizer.state_dict()


def load_optimizer_state_dict(model: nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Load what :func:`optimizer_state_dict` gave, with any model."""
    if isinstance(model, ShardedDataParallel):
        model.load_optimizer_state_dict(optimizer, state)
    else:
        optimizer.load_state_dict(state)


def whole_model(model: nn.Module, needed: bool) -> contextlib.AbstractContextManager[nn.Module | None]:
    """Take the model itself, or a copy of a sharded one, out of its wrappers, to evaluate it on the master alone.

    Args:
        model: as it is trained.
        needed: whether there is something to evaluate; only the master's word counts.

    Returns:
        A context with the model on the master, and None elsewhere or if it is not needed. All processes must enter it.
    """
    if isinstance(model, ShardedDataParallel):
        return model.whole(needed)
    return contextlib.nullcontext(compat.unwrap(model) if needed and distributed.is_master() else None)


def unwrap(model: nn.Module) -> nn.Module:
    """Return the model itself, out of its wrappers; the parameters of a sharded one are this process's parts."""
    model = compat.unwrap(model)
    return model.module if isinstance(model, ShardedDataParallel) else model


def local(tensor: Tensor) -> Tensor:
    """Return the part of a parameter or gradient that lies on this process, in the same memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@torch.no_grad()
def clip_grad_norm_(parameters: Iterable[nn.Parameter], max_norm: float) -> None:
    """Clip as ``torch.nn.utils.clip_grad_norm_``, also where some gradients are spread over the processes."""
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
    """Return whether all parameters are finite on all processes, which must all ask. Waits for the device."""
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
    """Return a state's value with the whole tensor on the master, None elsewhere; other values as they are."""
    if not isinstance(value, DTensor):
        return value
    whole = value.full_tensor()
    if not distributed.is_master():
        return None
    return whole.reshape(()).cpu() if is_scalar else whole.cpu()


def _scattered(value: Any, like: Tensor) -> Any:
    """Return this process's part of a whole tensor, spread as ``like`` is; what is not spread, or does not fit, as it is."""
    if not isinstance(like, DTensor) or not isinstance(value, Tensor):
        return value
    if value.shape != like.shape and (value.ndim > 0 or like.numel() > 1):
        return value
    whole = value.to(like.device, like.dtype).reshape(like.shape)
    return distribute_tensor(whole, like.device_mesh, like.placements)


def _parameters_of(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    """Return the parameters in the order in which ``optimizer.state_dict()`` numbers them."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]
