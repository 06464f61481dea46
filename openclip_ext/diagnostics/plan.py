"""Plan a training run: memory per rank and communication per step, for several numbers of ranks.

The plan needs no GPUs and no data. It runs the model, and the loss with state for a few samples, on tensors without values
(see ``dry_run.py``). The plan does not include memory that libraries reserve.
"""

import argparse
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import open_clip
import torch

from openclip_ext import compat
from openclip_ext.cli import command_line
from openclip_ext.cli.command_line import count
from openclip_ext.cli.errors import UsageError
from openclip_ext.contrastive.loss import ContrastiveLoss
from openclip_ext.data.loader.build import build_source
from openclip_ext.data.reference import EmbeddingStore
from openclip_ext.diagnostics.dry_run import ALL_REDUCE, DryRun, activation_bytes, dry_run, sent_bytes
from openclip_ext.losses import registry
from openclip_ext.losses.options import PARTS, REFERENCE_OPTIONS
from openclip_ext.model_configs import add_model_configs
from openclip_ext.state.sharded_table import shard_bounds
from openclip_ext.training.config import RunPlan
from openclip_ext.training.flags import parse
from openclip_ext.training.parser import chosen
from openclip_ext.training.plan import ONE_PROCESS, plan_run

LARGEST_WORLD = 1024
_GIB, _MIB = 2**30, 2**20
# Number of samples for which the loss is built. The plan scales the loss's state to the run's number of samples.
_FEW_SAMPLES = 64
# Float32 values per parameter: the parameter, its gradient and AdamW's two moments. DDP's gradient buckets add one.
_PARAMETER_COPIES, _DDP_PARAMETER_COPIES = 4, 5
# With these options, OpenCLIP's loss on several ranks is exact, and no rank needs the full similarity matrix.
_OPENCLIP_OPTIONS = {"local_loss": True, "gather_with_grad": True}


@dataclass(frozen=True)
class Training:
    """The training run to plan. The fields have the names of flags; ``options`` are options of ``create_loss``."""

    loss: str
    options: dict[str, Any]
    model: str
    samples: int
    global_batch: int
    precision: str = "amp"
    grad_checkpointing: bool = False
    accum_freq: int = 1
    reference_dim: int | None = None  # embedding dimension of a reference model
    has_average: bool = False  # --model-ema-decay: one more float32 copy of the parameters

    @classmethod
    def of(cls, config: RunPlan, samples: int, world_size: int, reference: EmbeddingStore | None = None) -> "Training":
        """Return the training run of a configuration with ``samples`` samples on ``world_size`` ranks."""
        return cls(
            loss=config.loss.name,
            options={
                name: config.loss.options[name]
                for name in config.loss.given
                if reference is not None or name not in REFERENCE_OPTIONS  # --reference start has no embeddings yet
            },
            model=config.model.file_name,
            samples=samples,
            global_batch=config.loading.batch_size * config.loading.accum_freq * world_size,
            precision=config.step.precision,
            grad_checkpointing=config.model.grad_checkpointing,
            accum_freq=config.loading.accum_freq,
            reference_dim=None if reference is None else reference.width,
            has_average=config.step.model_ema_decay is not None,
        )

    def create_loss(self, embed_dim: int, samples: int = _FEW_SAMPLES) -> ContrastiveLoss:
        """Create the run's loss with state for ``samples`` samples."""
        options = {} if self.reference_dim is None else {"steer": True}
        options |= self.options
        uses_openclips = _OPENCLIP_OPTIONS.keys() <= registry.options_used_by(self.loss, **options).keys()
        more = _OPENCLIP_OPTIONS if uses_openclips else registry.run_defaults(self.loss, options)
        return registry.create_loss(self.loss, embed_dim, samples, self.reference_dim, **(more | options))


@dataclass(frozen=True)
class Row:
    """Memory needs with ``world_size`` ranks, in bytes per GPU. ``gradient``: bytes to all-reduce for the model's gradient."""

    world_size: int
    local_batch: int
    model: int
    activations: int
    state: int
    gradient: dict[str, float]
    loss: DryRun

    @property
    def gpu(self) -> int:
        """Return the total bytes per GPU, assuming that loss and encoders reach their peaks at the same time."""
        return self.model + self.activations + self.state + self.loss.work_bytes


class Plan:
    """A prediction of the memory and communication of a training run.

    Attributes:
        replicated: Bytes of the loss's state that every rank stores in full.
        of_sample: Bytes per sample of the loss's tables.
        asked: The row for ``world_size`` ranks.
    """

    def __init__(self, training: Training, world_size: int, gpu_memory: float) -> None:
        if training.samples < training.global_batch:
            raise ValueError(f"--samples {training.samples}: expected at least --global-batch {training.global_batch}")
        models = open_clip.list_models()
        if training.model not in models:
            raise ValueError(f"--model {training.model}: expected one of {', '.join(models)}")
        self.training, self.gpu_memory = training, gpu_memory
        with command_line.without_warnings():
            model = open_clip.create_model(training.model, device="meta", output_dict=True)
        self.parameters = sum(parameter.numel() for parameter in model.parameters())
        self.embed_dim = compat.embedding_dim(training.model, model)
        loss = training.create_loss(self.embed_dim)
        # A loss with two views of each image trains only the visual tower.
        trained = model if loss.views == 1 else model.visual
        self.trained = sum(parameter.numel() for parameter in trained.parameters())
        self.replicated = loss.state_size().replicated
        self.of_sample = loss.state_size().per_sample // _FEW_SAMPLES
        # Activations are linear in the batch size, so two measurements are enough.
        micro_batch = _part(_part(training.global_batch, world_size), training.accum_freq)
        batches = micro_batch, 2 * micro_batch
        once, twice = activation_bytes(model, batches, training.precision, training.grad_checkpointing, loss.views)
        self._fixed, self._of_image = 2 * once - twice, (twice - once) / micro_batch
        self.asked = self.row(world_size)

    def row(self, world_size: int) -> Row:
        """Return the row for ``world_size`` ranks. Raise ValueError if the batch is not divisible by this number."""
        training = self.training
        local_batch = _part(training.global_batch, world_size)
        create = partial(training.create_loss, self.embed_dim)
        copies = (_PARAMETER_COPIES if world_size == 1 else _DDP_PARAMETER_COPIES) + training.has_average
        frozen_copies = 1 + training.has_average
        first, end = shard_bounds(training.samples, 0, world_size)
        return Row(
            world_size=world_size,
            local_batch=local_batch,
            model=4 * (copies * self.trained + frozen_copies * (self.parameters - self.trained)),
            activations=int(self._fixed + self._of_image * _part(local_batch, training.accum_freq)),
            state=self.replicated + self.of_sample * (end - first),
            gradient={ALL_REDUCE: 4.0 * self.trained} if world_size > 1 else {},
            loss=dry_run(create, local_batch, self.embed_dim, world_size, self._period()),
        )

    def _period(self) -> int:
        """Return the number of steps after which the loss's communication repeats (AmorLIP's ``fit_every``)."""
        options = self.training.options
        parts = {part: options.get(part) for part in (*PARTS, "views")}
        return options.get("fit_every", registry.options_used_by(self.training.loss, **parts).get("fit_every", 1))

    def warning(self, row: Row) -> str | None:
        """Return a warning with a fix if a GPU has too little memory, else None."""
        if row.gpu <= self.gpu_memory:
            return None
        return (
            f"{row.world_size} rank{'s' if row.world_size > 1 else ''}: a GPU needs {_gib(row.gpu)} GiB "
            f"and has {_gib(self.gpu_memory)} GiB: use more ranks, "
            "--accum-freq or --grad-checkpointing for fewer activations, or a smaller --global-batch"
        )

    def report(self) -> Iterator[str]:
        yield from [*self._sizes(), "", *self._communication(), "", *self._table()]
        if warning := self.warning(self.asked):
            yield f"WARNING: {warning}"

    def _sizes(self) -> Iterator[str]:
        training, row, available = self.training, self.asked, self.gpu_memory
        sizes = f"n = {training.samples:,}, global batch {training.global_batch}, {row.world_size} ranks"
        yield f"{training.loss}, {training.model}, {sizes}"
        if training.loss == "openclip":
            yield "with --local-loss --gather-with-grad; without these flags, each rank stores a full B x B matrix"
        millions = self.parameters / 1e6
        how = f"{training.precision}, {'with' if training.grad_checkpointing else 'without'} --grad-checkpointing"
        yield f"model                      {_gib(row.model)} GiB a GPU ({millions:.1f} M parameters, AdamW, float32)"
        yield f"activations                {_gib(row.activations)} GiB a GPU ({how})"
        yield f"loss, on every GPU         {_gib(self.replicated)} GiB a GPU"
        if self.of_sample:
            share, total = _gib(row.state - self.replicated), _gib(training.samples * self.of_sample)
            yield f"loss, per sample           {share} GiB a GPU ({total} GiB in all, {self.of_sample} bytes each)"
        yield f"loss, temporary memory     {_gib(row.loss.work_bytes)} GiB a GPU"
        yield ""
        fits = "fits" if row.gpu <= available else "does not fit"
        largest = max(0, int((available - (row.gpu - row.activations) - self._fixed) / self._of_image))
        yield f"a GPU needs {_gib(row.gpu)} of its {_gib(available)} GiB: {fits}; up to {largest} samples in a micro-batch fit"

    def _communication(self) -> Iterator[str]:
        row = self.asked
        yield f"each step, {row.world_size} ranks (MiB):  total   sent by a rank"
        rows = {f"loss, {kind}": {kind: size} for kind, size in sorted(row.loss.exchanged.items())}
        for name, exchanged in (rows | {"model, all-reduce of gradient": row.gradient}).items():
            size, sent = sum(exchanged.values()), sent_bytes(exchanged, row.world_size)
            yield f"  {name:<28}{size / _MIB:>9.3f}{sent / _MIB:>11.3f}"

    def _table(self) -> Iterator[str]:
        yield "            GiB a GPU                                      MiB sent a step"
        yield "ranks  batch    model   activ.    state     work      sum     loss  gradient"
        for world_size in sorted({2**power for power in range(LARGEST_WORLD.bit_length())} | {self.asked.world_size}):
            try:
                row = self.asked if world_size == self.asked.world_size else self.row(world_size)
            except ValueError as error:
                yield f"{world_size:>5}  {error}"
                continue
            parts = (row.model, row.activations, row.state, row.loss.work_bytes, row.gpu)
            sizes = "".join(f"{_gib(size):>9}" for size in parts)
            sent, gradient = (sent_bytes(part, world_size) / _MIB for part in (row.loss.exchanged, row.gradient))
            notes = (" <" if row is self.asked else "") + (" does not fit" if self.warning(row) else "")
            yield f"{world_size:>5}{row.local_batch:>7}{sizes}{sent:>9.2f}{gradient:>10.2f}{notes}"


def _part(batch: int, parts: int) -> int:
    if batch % parts:
        raise ValueError(f"a batch of {batch} is not divisible into {parts} equal parts")
    return batch // parts


def _gib(size: float) -> str:
    return f"{size / _GIB:.3f}" if size < 100 * _GIB else f"{size / _GIB:.0f}"


def run_to_plan(argv: list[str], world_size: int) -> RunPlan:
    """Return the configuration of a run with the flags of ``train`` on ``world_size`` ranks, before it is started."""
    return plan_run(parse(argv), ONE_PROCESS | {"world_size": world_size, "distributed": world_size > 1})


def main(argv: list[str]) -> None:
    """Print the plan of the run with the given flags of ``train``."""
    add_model_configs()
    usage = "openclip-ext plan [FLAG] FLAGS OF TRAIN ..."
    parser = command_line.Parser(prog="openclip-ext plan", allow_abbrev=False, usage=usage)
    parser.add_argument("--samples", type=count, help="number of samples, such as 1e9, instead of --train-data")
    add_machine_flags(parser)
    own, flags = parser.parse_known_args(argv)
    if (batch := chosen(flags, "--global-batch")) is not None and chosen(flags, "--batch-size") is None:
        # A run would use micro-batches of the default size. The plan tells whether larger ones fit.
        flags.append(f"--batch-size={max(1, count(batch) // own.world_size)}")
    config = run_to_plan(flags + ["--dataset-type", "synthetic"] * (own.samples is not None), own.world_size)
    if config.data is None:
        raise UsageError("the number of samples is unknown: give --samples or --train-data")
    source = None if own.samples is not None else build_source(config.data)
    samples, reference = (own.samples, None) if source is None else (source.num_samples, source.reference)
    training = Training.of(config, samples, own.world_size, reference)
    for line in Plan(training, own.world_size, own.gpu_memory).report():
        print(line)


def add_machine_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--world-size", type=count, default=1, help="number of GPUs (default: %(default)s)")
    here = torch.cuda.get_device_properties(0).total_memory if torch.cuda.is_available() else 80e9
    help = "memory of a GPU in GB (default: memory of this machine's GPU, or 80 if there is none)"
    parser.add_argument("--gpu-memory", type=_gigabytes, default=here, metavar="GB", help=help)


def _gigabytes(text: str) -> float:
    value = float(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text}: expected a positive number of GB")
    return value * 1e9


if __name__ == "__main__":
    command_line.run(main)
