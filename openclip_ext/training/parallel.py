"""The model on several processes: a replica on each process (DDP), or sharded parameters (FSDP2, ``--fsdp``).

All code that differs between DDP and FSDP2 is in this file: gradient clipping, the optimizer's state, the logit scale, and the
full model for an evaluation.
"""

import contextlib
import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from openclip_ext import compat, distributed
from openclip_ext.cli.errors import UsageError
from openclip_ext.cli.messages import get_logger
from openclip_ext.contrastive.model import frozen_batchnorm_statistics
from openclip_ext.training.config import ParallelConfig

logger = get_logger(__name__)

# Optimizers that update each element of a parameter independently, so they can update shards.
SHARDABLE_OPTIMIZERS = ("adamw", "timm/adamw", "timm/sgd", "timm/momentum", "timm/lion")
_LOOKAHEAD = "lookahead_"


def distribute(model: nn.Module, config: ParallelConfig, device: torch.device, keep_whole: bool) -> nn.Module:
    """Wrap the model for several processes. For ``keep_whole``, see :class:`ShardedDataParallel`."""
    if device.type == "meta":
        return model
    if distributed.world_size() == 1:
        if config.fsdp:
            logger.warning(
                "--fsdp has no effect with a single process: start several processes with torchrun, or remove the flag."
            )
        return model
    if config.sync_batchnorm:
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    if config.fsdp:
        return ShardedDataParallel(model, device, config, keep_whole)
    devices = None if device.type == "cpu" else [device]
    return nn.parallel.DistributedDataParallel(model, device_ids=devices, static_graph=config.static_graph)


def compiled(model: nn.Module, config: ParallelConfig) -> nn.Module:
    """Compile the model if ``--torchcompile`` is given. The blocks of a sharded model are already compiled."""
    if not config.compile or isinstance(model, ShardedDataParallel):
        return model
    if config.grad_checkpointing and distributed.world_size() > 1:
        # Dynamo's DDP optimizer does not support gradient checkpointing. OpenCLIP also turns this optimizer off.
        torch._dynamo.config.optimize_ddp = False
    return cast(nn.Module, torch.compile(model))


def order_buckets(model: nn.Module, forward: Callable[[], Mapping[str, Tensor]], device: torch.device) -> None:
    """Run a backward pass with zero gradients, in which DDP orders its gradient buckets. Call this before the first step.

    DDP changes the order after a process's first backward pass, or the second with ``--ddp-static-graph``. With three ranks
    or more, sums in another order have other rounding errors, so the first steps after a resume would differ.
    """
    if distributed.world_size() < 3 or isinstance(model, ShardedDataParallel):
        return
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices), frozen_batchnorm_statistics(model):
        for _ in range(2 if getattr(model, "static_graph", False) else 1):
            outputs = [value for value in forward().values() if value.requires_grad]
            torch.autograd.backward(outputs, [torch.zeros_like(value) for value in outputs])


class ShardedDataParallel(nn.Module):
    """A model whose parameters, gradients and optimizer state are sharded over the processes (FSDP2).

    As with DistributedDataParallel, gradients are averaged over the processes. ``state_dict`` and ``load_state_dict`` use the
    full model's tensors and names. Both methods are collective: all ranks call them.

    Results are equal to DDP's results, except for rounding. DDP averages gradients of 16-bit parameters in 16 bits, but this
    class averages them in float32, which differs with three processes or more. FSDP2 cannot shard 0-d parameters
    (``logit_scale``), so they become vectors of one element. Gradients are averaged after each micro-batch, because otherwise
    every process would keep full gradients.

    The model is sharded in place. With ``keep_whole``, rank 0 keeps a full copy on the host for :func:`whole_model`. Raise
    UsageError if the parameters have several dtypes, as with ``--precision bf16`` or ``fp16``.
    """

    def __init__(self, model: nn.Module, device: torch.device, config: ParallelConfig, keep_whole: bool) -> None:
        super().__init__()
        dtypes = {parameter.dtype for parameter in model.parameters()}
        if len(dtypes) > 1:
            found = ", ".join(sorted(map(str, dtypes)))
            raise UsageError(f"--fsdp needs one dtype, found {found}: use --precision amp_bf16 or pure_bf16")
        is_narrow = bool(dtypes & {torch.float16, torch.bfloat16})
        policy = MixedPrecisionPolicy(reduce_dtype=torch.float32 if is_narrow else None)
        # The copy is in a list, so that PyTorch does not register it as a submodule.
        self.whole = [copy.deepcopy(model).cpu()] if keep_whole and distributed.is_rank0() else []
        self.scalars = _give_scalars_a_dimension(model)
        mesh = init_device_mesh(device.type, (distributed.world_size(),))
        options: dict[str, Any] = {"mesh": mesh, "mp_policy": policy}
        if config.keep_gathered:
            options["reshard_after_forward"] = False
        for block in blocks_of(model):
            if config.compile:
                block.compile()
            fully_shard(block, **options)
        fully_shard(model, **options)
        self.module = model

    def forward(self, *inputs: Any, **named: Any) -> dict[str, Any]:
        """Call the model, and return its output with ``logit_scale`` (and ``logit_bias``) as 0-d tensors.

        Under autocast, a vector of one element would change the dtype of OpenCLIP's losses to float32.
        """
        outputs = self.module(*inputs, **named)
        return {name: value.reshape(()) if name in self.scalars else value for name, value in outputs.items()}

    def state_dict(self, *args: Any, **options: Any) -> dict[str, Any]:  # type: ignore[override]
        """Return the full model's state, in host memory, on rank 0. On other ranks, sharded tensors are None."""
        state = self.module.state_dict(*args, **options)
        return {name: _gathered(value, name in self.scalars) for name, value in state.items()}

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **options: Any) -> Any:
        """Load the full model's state. Every process must pass the full state."""
        own = self.module.state_dict()
        parts = {name: _scattered(value, own[name]) if name in own else value for name, value in state_dict.items()}
        return self.module.load_state_dict(parts, *args, **options)


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """Return the modules that FSDP2 gathers one by one, inner modules first: transformer blocks, CNN stages and blocks."""
    blocks = []
    for stack in model.modules():
        if isinstance(stack, nn.Sequential | nn.ModuleList):
            layers = list(stack)
            if len({type(layer) for layer in layers}) == 1 and next(layers[0].children(), None) is not None:
                blocks += layers
    return blocks[::-1]


def check_shardable(optimizer: str, has_scaler: bool, has_head: bool) -> None:
    """Raise UsageError if ``--fsdp`` does not support the optimizer, or a gradient scaler with projection heads."""
    if optimizer.replace(_LOOKAHEAD, "") not in SHARDABLE_OPTIMIZERS:
        known = ", ".join(SHARDABLE_OPTIMIZERS)
        raise UsageError(f"--fsdp does not support --opt {optimizer}: expected {known} (or timm/{_LOOKAHEAD}NAME)")
    if has_scaler and has_head:
        raise UsageError("--fsdp with projection heads does not support torch's GradScaler: use --precision amp_bf16")


def optimizer_state_dict(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return ``optimizer.state_dict()``, with full tensors on rank 0. Collective: all ranks call it."""
    packed = optimizer.state_dict()
    if not isinstance(model, ShardedDataParallel):
        return packed
    parameters = _parameters_of(optimizer)
    scalars = {id(parameter) for name, parameter in model.module.named_parameters() if name in model.scalars}
    state = {
        number: {name: _gathered(value, id(parameters[number]) in scalars) for name, value in values.items()}
        for number, values in packed["state"].items()
    }
    return {**packed, "state": state}


def load_optimizer_state_dict(model: nn.Module, optimizer: torch.optim.Optimizer, packed: dict[str, Any]) -> None:
    """Load the result of :func:`optimizer_state_dict` for a sharded or replicated model."""
    if isinstance(model, ShardedDataParallel):
        parameters = _parameters_of(optimizer)
        state = {
            number: {
                # ``step`` is a single number per parameter, so it is not sharded.
                name: value if name == "step" else _scattered(value, parameters[number])
                for name, value in values.items()
            }
            for number, values in packed["state"].items()
        }
        packed = {**packed, "state": state}
    optimizer.load_state_dict(packed)


@contextlib.contextmanager
def whole_model(model: nn.Module, needed: bool) -> Iterator[nn.Module | None]:
    """Yield the full, unwrapped model on rank 0 (a copy, if the model is sharded), and None on other ranks.

    If ``needed`` is False on rank 0, all ranks yield None. Collective: all ranks call it.
    """
    if not isinstance(model, ShardedDataParallel):
        yield compat.unwrap(model) if needed and distributed.is_rank0() else None
        return
    state = model.state_dict() if distributed.broadcast_object(needed) else None
    if state is None or not distributed.is_rank0():
        yield None
        return
    (copied,) = model.whole
    copied.load_state_dict(state)
    try:
        yield copied.to(next(model.module.parameters()).device)
    finally:
        copied.cpu()


def unwrap(model: nn.Module) -> nn.Module:
    """Return the model without its wrappers. The parameters of a sharded model are this process's shards."""
    model = compat.unwrap(model)
    return model.module if isinstance(model, ShardedDataParallel) else model


def local(tensor: Tensor) -> Tensor:
    """Return this process's shard of a parameter or gradient, without a copy. Tensors that are not sharded stay unchanged."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@torch.no_grad()
def clip_grad_norm_(parameters: Iterable[nn.Parameter], max_norm: float) -> None:
    """Clip gradients like ``torch.nn.utils.clip_grad_norm_``. All, some or none of the gradients may be sharded."""
    parameters = list(parameters)
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    shards = [gradient.to_local() for gradient in gradients if isinstance(gradient, DTensor)]
    if not shards:
        nn.utils.clip_grad_norm_(parameters, max_norm, norm_type=2.0)
        return
    full = [gradient for gradient in gradients if not isinstance(gradient, DTensor)]
    square = distributed.all_reduce_sum(nn.utils.get_total_norm(shards).double().square())
    if full:
        square += nn.utils.get_total_norm(full).double().square()
    factor = (max_norm / (square.sqrt() + 1e-6)).clamp(max=1.0)
    for gradient in [*shards, *full]:
        gradient.mul_(factor.to(gradient.dtype))


@torch.no_grad()
def all_finite(parameters: Iterable[Tensor]) -> bool:
    """Return whether all parameters are finite on all ranks. Synchronizes with the device. Collective: all ranks call it."""
    finite = torch.stack([torch.isfinite(local(parameter)).all() for parameter in parameters]).all()
    return all(distributed.all_gather_object(bool(finite)))


def _give_scalars_a_dimension(model: nn.Module) -> set[str]:
    """Replace 0-d parameters by vectors of one element. Return their names."""
    names = {name for name, parameter in model.named_parameters() if parameter.ndim == 0}
    for name in names:
        path, _, attribute = name.rpartition(".")
        owner = model.get_submodule(path)
        scalar = getattr(owner, attribute)
        setattr(owner, attribute, nn.Parameter(scalar.detach().reshape(1), requires_grad=scalar.requires_grad))
    return names


def _gathered(value: Any, is_scalar: bool) -> Any:
    """Return a sharded tensor's full tensor on rank 0, and None on other ranks. Other values are returned unchanged."""
    if not isinstance(value, DTensor):
        return value
    full = value.full_tensor()
    if not distributed.is_rank0():
        return None
    return full.reshape(()).cpu() if is_scalar else full.cpu()


def _scattered(value: Any, like: Tensor) -> Any:
    """Return this process's shard of a full tensor, sharded like ``like``. Other values are returned unchanged."""
    if not isinstance(like, DTensor) or not isinstance(value, Tensor):
        return value
    if value.shape != like.shape and (value.ndim > 0 or like.numel() > 1):
        return value
    full = value.to(like.device, like.dtype).reshape(like.shape)
    return distribute_tensor(full, like.device_mesh, like.placements)


def _parameters_of(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    """Return the parameters of all groups, in the order in which ``optimizer.state_dict()`` numbers them."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]
