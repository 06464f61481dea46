"""Plan a training: memory of each rank and node, and what a step sends, as the number of ranks grows.

    python -m openclip_ext.diagnostics.plan --samples 1e9 --world-size 64 --global-batch 5120 --model ViT-B-16 --loss neuclip

It trains nothing and needs neither GPUs nor data. The plan is not a separate formula: it builds the real model, loss and
manifest, without values or for few samples, and runs loss (``dry_run.py``) and model (``activations.py``) without values. It
leaves out the memory that libraries keep for themselves.
"""

import argparse
import math
import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import open_clip
import torch

from openclip_ext import compat
from openclip_ext.contrastive.loss import ContrastiveLoss
from openclip_ext.data.manifest import Manifest, Shard
from openclip_ext.diagnostics import command_line
from openclip_ext.diagnostics.activations import PRECISIONS, activation_bytes
from openclip_ext.diagnostics.command_line import count
from openclip_ext.diagnostics.dry_run import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER, SEND, DryRun, Exchange, dry_run
from openclip_ext.losses import registry
from openclip_ext.losses.options import PLACEMENT_OPTIONS
from openclip_ext.losses.registry import OPTIONS
from openclip_ext.model_configs import add_model_configs
from openclip_ext.state.sharded_table import goes_to_host, shard_bounds
from openclip_ext.training import flag_table
from openclip_ext.training.parser import add_loss_flags

LARGEST_WORLD = 1024
_GIB, _MIB = 2**30, 2**20
# Size of the loss and of the manifest that are built to measure them.
_FEW_SAMPLES, _FEW_SHARDS = 64, 100
# The parameter, its gradient and AdamW's two moments in float32; with DDP also the buckets of the gradients.
_COPIES_OF_A_PARAMETER, _COPIES_WITH_DDP = 4, 5
# OpenCLIP's loss is exact on several ranks, without the whole matrix on each, only with these options.
_OPENCLIP_OPTIONS = {"local_loss": True, "gather_with_grad": True}


@dataclass(frozen=True)
class Setting:
    """The training to plan.

    Attributes:
        loss: name of the loss.
        options: for ``create_loss``.
        model: name of an OpenCLIP model.
        samples: ``n``.
        global_batch: ``B``.
        ranks_per_node: GPUs of a node.
        samples_per_shard: of the data set; img2dataset writes 10,000.
        precision, grad_checkpointing, accum_freq: as the flags of a training.
    """

    loss: str
    options: dict[str, Any]
    model: str
    samples: int
    global_batch: int
    ranks_per_node: int = 8
    samples_per_shard: int = 10_000
    precision: str = "amp"
    grad_checkpointing: bool = False
    accum_freq: int = 1

    def create_loss(self, embed_dim: int, samples: int = _FEW_SAMPLES) -> ContrastiveLoss:
        """The loss, with state for a few samples instead of ``n``, kept with the model."""
        more = _OPENCLIP_OPTIONS if self.loss == "openclip" else {}
        options = {name: value for name, value in self.options.items() if name not in PLACEMENT_OPTIONS}
        return registry.create_loss(self.loss, embed_dim=embed_dim, num_samples=samples, **(more | options))


@dataclass(frozen=True)
class ModelSize:
    """Size of a model.

    Attributes:
        parameters: number of parameters.
        embed_dim: width of the embeddings.
    """

    parameters: int
    embed_dim: int

    def training_bytes(self, world_size: int) -> int:
        """Parameters, gradients and AdamW's moments, in float32."""
        return (_COPIES_OF_A_PARAMETER if world_size == 1 else _COPIES_WITH_DDP) * 4 * self.parameters

    def gradient_exchange(self) -> Exchange:
        """The all-reduce of DistributedDataParallel in each step."""
        return Exchange(ALL_REDUCE, 4 * self.parameters)


@dataclass(frozen=True)
class LossState:
    """Bytes of a loss's state.

    Attributes:
        replicated: on each GPU, the same on all ranks.
        of_sample: for each table, bytes per sample.
    """

    replicated: int
    of_sample: tuple[int, ...]


@dataclass(frozen=True)
class ActivationSize:
    """Bytes of the encoders' forward and backward pass.

    Attributes:
        fixed: whatever the batch.
        of_sample: for each sample of a micro-batch.
    """

    fixed: float
    of_sample: float

    def bytes(self, micro_batch: int) -> int:
        """Of one micro-batch; there is never more than one at a time."""
        return int(self.fixed + self.of_sample * micro_batch)


@dataclass(frozen=True)
class Row:
    """Needs of ``world_size`` ranks, in bytes.

    Attributes:
        world_size: ``K``.
        local_batch: ``B/K``.
        model: model and optimizer, per GPU.
        activations: of the encoders, per GPU.
        state: state of the loss, per GPU.
        host_state: state of the loss in the memory or files of a node, all its ranks together.
        run: what a step of the loss sends and allocates.
        gradient: what a rank sends of the model's gradient in a step.
    """

    world_size: int
    local_batch: int
    model: int
    activations: int
    state: int
    host_state: int
    run: DryRun
    gradient: float

    @property
    def gpu(self) -> int:
        """Bytes per GPU, as if loss and encoders were at their peak together."""
        return self.model + self.activations + self.state + self.run.work_bytes


# --- sizes -----------------------------------------------------------------------------------------------------------


def model_size(name: str) -> ModelSize:
    """Size of an OpenCLIP model, built without values.

    Raises:
        ValueError: there is no such model.
    """
    if name not in open_clip.list_models():
        raise ValueError(f"--model {name}: expected one of {', '.join(open_clip.list_models())}")
    with command_line.without_warnings():
        model = open_clip.create_model(name, device="meta")
    parameters = sum(parameter.numel() for parameter in model.parameters())
    return ModelSize(parameters, compat.embedding_dim(name, model))


def manifest_bytes(samples: int, samples_per_shard: int) -> int:
    """Bytes of a data set's manifest, from a small one of local shards written to disk."""
    few = [
        Shard(f"/data/{number:05d}.tar", samples_per_shard, number * samples_per_shard, 10**9, 10**18, "0" * 16, True)
        for number in range(_FEW_SHARDS)
    ]
    blocks = np.zeros(_FEW_SHARDS * samples_per_shard, np.uint32)
    with tempfile.TemporaryDirectory() as folder:
        Manifest(few, blocks=blocks).save(Path(folder) / "manifest.json")
        written = sum(path.stat().st_size for path in Path(folder).iterdir())
    return math.ceil(written / len(blocks) * samples)


def loss_state(setting: Setting, embed_dim: int) -> LossState:
    """Sizes of a loss's state, from one with few samples."""
    loss = setting.create_loss(embed_dim)
    of_sample = tuple(table.nbytes // table.size for table in loss.tables().values())
    return LossState(loss.state_size().replicated, of_sample)


def table_bytes(setting: Setting, state: LossState, world_size: int) -> tuple[int, int]:
    """Bytes of one rank's parts of all tables: on its GPU and on the host."""
    first, end = shard_bounds(setting.samples, 0, world_size)
    on_gpu = on_host = 0
    for of_sample in state.of_sample:
        size = of_sample * (end - first)
        if goes_to_host(setting.options.get("state_device", "auto"), setting.options.get("state_dir"), size):
            on_host += size
        else:
            on_gpu += size
    return on_gpu, on_host


def activation_size(setting: Setting, micro_batch: int) -> ActivationSize:
    """What the encoders take: counted for a micro-batch and for twice as many, and a straight line through both."""
    batches = micro_batch, 2 * micro_batch
    once, twice = activation_bytes(setting.model, batches, setting.precision, setting.grad_checkpointing)
    return ActivationSize(2 * once - twice, (twice - once) / micro_batch)


def plan_row(setting: Setting, model: ModelSize, activations: ActivationSize, state: LossState, world_size: int) -> Row:
    """Needs of ``world_size`` ranks.

    Raises:
        ValueError: the global batch cannot be divided by ``world_size``, or a rank's by ``--accum-freq``.
    """
    local_batch = _part(setting.global_batch, world_size)
    on_gpu, on_host = table_bytes(setting, state, world_size)
    run = dry_run(
        lambda: setting.create_loss(model.embed_dim), local_batch, model.embed_dim, world_size, _period(setting)
    )
    if on_host and world_size > 1:
        per_step = [prefetch_exchange(setting.global_batch, setting.create_loss(model.embed_dim).views)]
        run = replace(run, exchanges=run.exchanges + run.steps * per_step)
    return Row(
        world_size=world_size,
        local_batch=local_batch,
        model=model.training_bytes(world_size),
        activations=activations.bytes(_part(local_batch, setting.accum_freq)),
        state=state.replicated + on_gpu,
        host_state=on_host * min(world_size, setting.ranks_per_node),
        run=run,
        gradient=model.gradient_exchange().sent(world_size),
    )


def _part(batch: int, parts: int) -> int:
    if batch % parts:
        raise ValueError(f"a batch of {batch} cannot be cut into {parts} equal parts")
    return batch // parts


def prefetch_exchange(global_batch: int, views: int = 1) -> Exchange:
    """The all-gather of the batch's index by ``loss.prefetch``, before a step of a loss with tables on the host."""
    return Exchange(ALL_GATHER, views * global_batch * torch.int64.itemsize)


def _period(setting: Setting) -> int:
    """Number of steps after which the loss's communication repeats (AmorLIP fits its network every few)."""
    parts = {part: setting.options.get(part) for part in ("normalizer", "temperature_scheme", "views")}
    defaults = registry.options_used_by(setting.loss, **parts)
    return setting.options.get("fit_every", defaults.get("fit_every", 1))


# --- the machine -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Memory:
    """Bytes of a GPU, and of a node's host."""

    gpu: int
    host: int

    @classmethod
    def of(cls, gpu: float | None, host: float | None) -> "Memory":
        """The given GB; by default this machine's if it has a GPU, else 80 and 512."""
        here = torch.cuda.is_available()
        if gpu is None:
            gpu = torch.cuda.get_device_properties(0).total_memory / 1e9 if here else 80
        if host is None:
            host = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9 if here else 512
        return cls(int(gpu * 1e9), int(host * 1e9))


def warnings(setting: Setting, row: Row, memory: Memory) -> list[str]:
    """What does not fit, and what to do about it."""
    found = []
    if row.gpu > memory.gpu:
        found.append(
            f"{row.world_size} ranks: a GPU needs {_gib(row.gpu)} GiB, it has {_gib(memory.gpu)}: take more "
            f"ranks{_smaller(setting, row)}"
        )
    in_memory = 0 if setting.options.get("state_dir") else row.host_state
    if in_memory > memory.host:
        found.append(
            f"{row.world_size} ranks: a node's part of the per-sample state takes {_gib(in_memory)} GiB of its memory, it has "
            f"{_gib(memory.host)}: take more nodes, or --state-dir with a fast local disk"
        )
    return found


def _smaller(setting: Setting, row: Row) -> str:
    largest = max(row.model, row.activations, row.state, row.run.work_bytes)
    if largest == row.activations:
        return ", --accum-freq" + ("" if setting.grad_checkpointing else " or --grad-checkpointing")
    if largest == row.run.work_bytes:
        return " or a smaller --global-batch: the loss's work memory is the largest part"
    if largest == row.state and setting.options.get("state_device") == "model":
        return " or leave out --state-device model"
    return ""


# --- the report ------------------------------------------------------------------------------------------------------


def report(setting: Setting, world_size: int, memory: Memory) -> Iterator[str]:
    """The plan, line by line.

    Raises:
        ValueError: an unknown model or loss, wrong options, or a batch that cannot be cut into ``world_size`` parts or is
            more than all samples.
    """
    if setting.samples < setting.global_batch:
        raise ValueError(f"--samples {setting.samples} are fewer than a --global-batch of {setting.global_batch}")
    model = model_size(setting.model)
    state = loss_state(setting, model.embed_dim)
    micro_batch = _part(_part(setting.global_batch, world_size), setting.accum_freq)
    activations = activation_size(setting, micro_batch)
    asked = plan_row(setting, model, activations, state, world_size)
    yield from _sizes(setting, model, state, asked)
    yield ""
    yield from _batches(setting, activations, asked, memory)
    yield ""
    yield from _communication(asked)
    yield ""
    yield from _table(setting, model, activations, state, asked, memory)
    for warning in warnings(setting, asked, memory):
        yield f"WARNING: {warning}"


def _sizes(setting: Setting, model: ModelSize, state: LossState, row: Row) -> Iterator[str]:
    manifest = manifest_bytes(setting.samples, setting.samples_per_shard)
    in_all = setting.samples * sum(state.of_sample)
    place = setting.options.get("state_dir") or "host memory"
    yield (
        f"{setting.loss}, {setting.model}, n = {setting.samples:,}, global batch {setting.global_batch}, "
        f"{row.world_size} ranks, {min(row.world_size, setting.ranks_per_node)} a node"
    )
    if setting.loss == "openclip":
        yield "with --local-loss --gather-with-grad: without them each rank works on the whole B x B matrix, and needs more"
    yield f"manifest                   {_gib(manifest)} GiB, one file beside the shards"
    yield f"model                      {_gib(row.model)} GiB a GPU ({model.parameters / 1e6:.1f} M parameters, AdamW, float32)"
    how = f"{setting.precision}, {'with' if setting.grad_checkpointing else 'without'} --grad-checkpointing"
    yield f"activations                {_gib(row.activations)} GiB a GPU ({how})"
    yield f"loss, the same everywhere  {_gib(state.replicated)} GiB a GPU"
    if state.of_sample:
        on_gpu, on_host = table_bytes(setting, state, row.world_size)
        yield f"loss, of each sample       {_gib(in_all)} GiB in all ({sum(state.of_sample)} bytes each), once over all ranks:"
        yield f"                           {_gib(on_gpu)} GiB a GPU, {_gib(on_host)} GiB a rank in {place}"
    yield f"loss, work memory          {_gib(row.run.work_bytes)} GiB a GPU"


def _batches(setting: Setting, activations: ActivationSize, row: Row, memory: Memory) -> Iterator[str]:
    """Whether a step fits a GPU, which batch would, and what ``--accum-freq`` makes of it."""
    others = row.gpu - row.activations
    fits = "fits" if row.gpu <= memory.gpu else "does not fit"
    largest = max(0, int((memory.gpu - others - activations.fixed) / activations.of_sample))
    yield (
        f"a GPU needs {_gib(row.gpu)} GiB of {_gib(memory.gpu)}: {fits}; with this global batch up to {largest} samples in a "
        "pass would"
    )
    for accum_freq in (1, 2, 4, 8, 16, 32):
        if row.local_batch % accum_freq:
            break
        micro_batch = row.local_batch // accum_freq
        need = others + activations.bytes(micro_batch)
        note = " does not fit" if need > memory.gpu else ""
        yield f"  --batch-size {micro_batch:<6} --accum-freq {accum_freq:<3} {_gib(need):>9} GiB{note}"


def _communication(row: Row) -> Iterator[str]:
    yield f"each step, {row.world_size} ranks (MiB):  whole   sent by a rank"
    for kind in (ALL_GATHER, REDUCE_SCATTER, ALL_REDUCE, SEND):
        whole = row.run.size(kind)
        if whole:
            sent = Exchange(kind, whole).sent(row.world_size)
            yield f"  loss, {kind:<22}{whole / _MIB:>9.3f}{sent / _MIB:>11.3f}"
    whole = row.gradient / _ring(row.world_size)
    yield f"  model, {'all-reduce of gradient':<21}{whole / _MIB:>9.3f}{row.gradient / _MIB:>11.3f}"


def _ring(world_size: int) -> float:
    return Exchange(ALL_REDUCE, 1.0).sent(world_size) or 1.0


def _table(
    setting: Setting, model: ModelSize, activations: ActivationSize, state: LossState, asked: Row, memory: Memory
) -> Iterator[str]:
    yield "            GiB a GPU                                    GiB a node  MiB sent a step"
    yield "ranks  batch    model   activ.    state     work      sum    on host     loss  gradient"
    worlds = {2**power for power in range(LARGEST_WORLD.bit_length())} | {asked.world_size}
    for world_size in sorted(worlds):
        try:
            row = asked if world_size == asked.world_size else plan_row(setting, model, activations, state, world_size)
        except ValueError as error:
            yield f"{world_size:>5}  {error}"
            continue
        sizes = "".join(
            f"{_gib(size):>9}" for size in (row.model, row.activations, row.state, row.run.work_bytes, row.gpu)
        )
        sent = f"{row.run.sent(world_size) / _MIB:>9.2f}{row.gradient / _MIB:>10.2f}"
        notes = " <" if row is asked else ""
        notes += " does not fit" if warnings(setting, row, memory) else ""
        yield f"{world_size:>5}{row.local_batch:>7}{sizes}{_gib(row.host_state):>11}{sent}{notes}"


def _gib(size: float) -> str:
    return f"{size / _GIB:.3f}" if size < 100 * _GIB else f"{size / _GIB:.0f}"


# --- the command line ------------------------------------------------------------------------------------------------


def main(argv: list[str]) -> None:
    """Print a plan.

    Raises:
        ValueError: as :func:`report`.
    """
    args = _parser().parse_args(argv)
    options = {name: getattr(args, name) for name in OPTIONS if hasattr(args, name)}
    setting = Setting(
        loss=args.loss or "openclip",
        options=options,
        model=args.model,
        samples=args.samples,
        global_batch=args.global_batch,
        ranks_per_node=args.ranks_per_node,
        samples_per_shard=args.samples_per_shard,
        precision=args.precision,
        grad_checkpointing=args.grad_checkpointing,
        accum_freq=args.accum_freq,
    )
    add_model_configs()
    for line in report(setting, args.world_size, Memory.of(args.gpu_memory, args.host_memory)):
        print(line)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="openclip-ext plan", allow_abbrev=False, description=__doc__.splitlines()[0])
    parser.add_argument("--samples", type=count, required=True, help="samples of the data set; 1e9 is a number, too")
    parser.add_argument("--world-size", type=count, default=1, help="ranks, one a GPU (default: %(default)s)")
    parser.add_argument("--global-batch", type=count, required=True, help="samples of a step, over all ranks")
    parser.add_argument("--model", default="ViT-B-32", help="one of OpenCLIP's (default: %(default)s)")
    parser.add_argument("--ranks-per-node", type=count, default=8, help="GPUs of a node (default: %(default)s)")
    parser.add_argument("--samples-per-shard", type=count, default=10_000, help="default: %(default)s, as img2dataset")
    parser.add_argument("--precision", choices=PRECISIONS, default="amp", help="default: %(default)s, as OpenCLIP's")
    parser.add_argument("--grad-checkpointing", action="store_true", help="as in a training")
    parser.add_argument("--accum-freq", type=count, default=1, help="micro-batches of a step (default: %(default)s)")
    parser.add_argument("--gpu-memory", type=_gigabytes, help="GB (default: this machine's GPU's, or 80)")
    parser.add_argument(
        "--host-memory", type=_gigabytes, help="GB of a node (default: this machine's if it has a GPU, or 512)"
    )
    add_loss_flags(parser.add_argument_group("loss"), flag_table.of_losses())
    return parser


def _gigabytes(text: str) -> float:
    value = float(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text}: expected a positive number of GB")
    return value


if __name__ == "__main__":
    command_line.run(main)
