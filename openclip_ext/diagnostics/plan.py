"""Plan a training run: memory per rank and communication per step, for several numbers of ranks.

The plan needs no GPUs and no data. It builds the run on the meta device, where tensors have no values, and takes steps of its
model and loss there (see ``dry_run.py``). The plan does not include memory that libraries reserve.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

from openclip_ext import compat
from openclip_ext.cli import command_line
from openclip_ext.cli.command_line import count
from openclip_ext.cli.errors import UsageError
from openclip_ext.diagnostics.dry_run import activation_bytes, all_reduce_bytes, dry_run
from openclip_ext.diagnostics.meta_run import META, add_machine_flags, build_on_meta, run_to_plan
from openclip_ext.state.sharded_table import shard_bounds
from openclip_ext.training.config import RunPlan
from openclip_ext.training.model import build_loss, loss_options
from openclip_ext.training.parser import chosen
from openclip_ext.training.trainer import Trainer

LARGEST_WORLD = 1024
_GIB, _MIB = 2**30, 2**20
# Values per parameter: the parameter, its gradient and AdamW's two moments. DDP's gradient buckets add one.
_PARAMETER_COPIES, _DDP_PARAMETER_COPIES = 4, 5
# With these options, OpenCLIP's loss on several ranks is exact, and no rank needs the full similarity matrix.
_OPENCLIP_OPTIONS = {"local_loss": True, "gather_with_grad": True}


class Plan:
    """A prediction of the memory and communication of a training run on any number of ranks.

    Attributes:
        samples, global_batch: Sizes of the run.
        parameters: Number of the model's parameters, including frozen ones.
        trained, frozen: Bytes of the model's parameters.
        replicated: Bytes of the loss's state that every rank stores in full.
        of_sample: Bytes per sample of the loss's tables.
        asked: The row for the run's number of ranks, see :meth:`row`.
    """

    def __init__(self, run: RunPlan, trainer: Trainer, gpu_memory: float) -> None:
        """Plan a ``run`` whose ``trainer`` is on the meta device. The plan replaces the tensors of the trainer's model."""
        self.run, self.gpu_memory = run, gpu_memory
        self.samples, self.global_batch = trainer.identity.num_samples, trainer.identity.global_batch
        model, loss = compat.unwrap(trainer.model), trainer.loss
        self.parameters = sum(parameter.numel() for parameter in model.parameters())
        self.trained = sum(parameter.nbytes for parameter in model.parameters() if parameter.requires_grad)
        self.frozen = sum(parameter.nbytes for parameter in model.parameters()) - self.trained
        self.replicated = loss.state_size().replicated
        self.of_sample = loss.state_size().per_sample // (loss.num_samples or 1)
        self.embed_dim = compat.embedding_dim(run.model.name, model)
        reference = trainer.loader.source.reference
        steps = trainer.steps_per_epoch * run.length.epochs
        options = loss_options(run.loss, steps, run.model.is_pretrained, reference)
        self._fit_every = options.get("fit_every", 1)  # AmorLIP communicates more in some steps
        self._assumed = {name: value for name, value in _OPENCLIP_OPTIONS.items() if name in options}
        options |= self._assumed
        parts = replace(run.loss, without_effect=()), run.model.name, model, self.samples, META, reference, options
        self._create_loss = partial(build_loss, *parts)
        # Activations are linear in the batch size, so two measurements are enough.
        micro_batch = _part(_part(self.global_batch, run.world_size), run.length.accum_freq)
        batches = micro_batch, 2 * micro_batch
        once, twice = activation_bytes(model, batches, run.step.precision, loss.views)
        self._fixed, self._of_image = 2 * once - twice, (twice - once) / micro_batch
        self.asked = self.row(run.world_size)

    def row(self, world_size: int) -> dict[str, float]:
        """Return a row of the table for ``world_size`` ranks: bytes per GPU, and bytes that a rank sends per step.

        The sum assumes that loss and encoders reach their peaks at the same time. Raise ValueError if the batch is not
        divisible by the number of ranks.
        """
        local_batch = _part(self.global_batch, world_size)
        has_average = self.run.step.model_ema_decay is not None
        copies = (_PARAMETER_COPIES if world_size == 1 else _DDP_PARAMETER_COPIES) + has_average
        first, end = shard_bounds(self.samples, 0, world_size)
        sent, work = dry_run(self._create_loss, local_batch, self.embed_dim, world_size, self._fit_every)
        memory = {
            "model": copies * self.trained + (1 + has_average) * self.frozen,
            "activations": int(self._fixed + self._of_image * _part(local_batch, self.run.length.accum_freq)),
            "state": self.replicated + self.of_sample * (end - first),
            "work": work,
        }
        gradient = all_reduce_bytes(self.trained, world_size)
        return {**memory, "sum": sum(memory.values()), "loss sent": sent, "gradient sent": gradient}

    def warning(self, world_size: int, row: dict[str, float]) -> str | None:
        """Return a warning with a fix if a GPU has too little memory, else None."""
        if row["sum"] <= self.gpu_memory:
            return None
        return (
            f"{world_size} rank{'s' if world_size > 1 else ''}: a GPU needs {_gib(row['sum'])} GiB "
            f"and has {_gib(self.gpu_memory)} GiB: use more ranks, "
            "--accum-freq or --grad-checkpointing for fewer activations, or a smaller --global-batch"
        )

    def report(self) -> Iterator[str]:
        yield from [*self._sizes(), "", *self._table()]
        if warning := self.warning(self.run.world_size, self.asked):
            yield f"WARNING: {warning}"

    def _sizes(self) -> Iterator[str]:
        run, row, available = self.run, self.asked, self.gpu_memory
        sizes = f"n = {self.samples:,}, global batch {self.global_batch}, {run.world_size} ranks"
        yield f"{run.loss.name}, {run.model.file_name}, {sizes}"
        if self._assumed:
            yield "with --local-loss --gather-with-grad; without these flags, each rank stores a full B x B matrix"
        if run.parallel.fsdp:
            yield "without --fsdp, with which a GPU needs less memory"
        checkpointing = "with" if run.model.grad_checkpointing else "without"
        in_all = f"{_gib(self.samples * self.of_sample)} GiB in all, {self.of_sample} bytes each"
        parts = {
            "model": (row["model"], f" ({self.parameters / 1e6:.1f} M parameters, AdamW)"),
            "activations": (row["activations"], f" ({run.step.precision}, {checkpointing} --grad-checkpointing)"),
            "loss, on every GPU": (self.replicated, ""),
            "loss, per sample": (row["state"] - self.replicated, f" ({in_all})"),
            "loss, temporary memory": (row["work"], ""),
        }
        for name, (size, note) in parts.items():
            if name != "loss, per sample" or self.of_sample:
                yield f"{name:<27}{_gib(size)} GiB a GPU{note}"
        yield ""
        need, fits = row["sum"], "fits" if row["sum"] <= available else "does not fit"
        largest = max(0, int((available - (need - row["activations"]) - self._fixed) / self._of_image))
        yield f"a GPU needs {_gib(need)} of its {_gib(available)} GiB: {fits}; up to {largest} samples in a micro-batch fit"

    def _table(self) -> Iterator[str]:
        yield "            GiB a GPU                                      MiB sent a step"
        yield "ranks  batch    model   activ.    state     work      sum     loss  gradient"
        asked = self.run.world_size
        for world_size in sorted({2**power for power in range(LARGEST_WORLD.bit_length())} | {asked}):
            try:
                row = self.asked if world_size == asked else self.row(world_size)
            except ValueError as error:
                yield f"{world_size:>5}  {error}"
                continue
            *sizes, loss, gradient = row.values()
            columns = "".join(f"{_gib(size):>9}" for size in sizes) + f"{loss / _MIB:>9.2f}{gradient / _MIB:>10.2f}"
            notes = (" <" if world_size == asked else "") + (" does not fit" if self.warning(world_size, row) else "")
            yield f"{world_size:>5}{self.global_batch // world_size:>7}{columns}{notes}"


def _part(batch: int, parts: int) -> int:
    if batch % parts:
        raise ValueError(f"a batch of {batch} samples cannot be divided into {parts} equal parts")
    return batch // parts


def _gib(size: float) -> str:
    return f"{size / _GIB:.3f}" if size < 100 * _GIB else f"{size / _GIB:.0f}"


def main(argv: list[str]) -> None:
    """Print the plan of the run with the given flags of ``train``."""
    usage = "openclip-ext plan [FLAG] FLAGS OF TRAIN ..."
    parser = command_line.Parser(prog="openclip-ext plan", allow_abbrev=False, usage=usage)
    parser.add_argument("--samples", type=count, help="number of samples, such as 1e9, instead of --train-data")
    add_machine_flags(parser)
    own, flags = parser.parse_known_args(argv)
    if (batch := chosen(flags, "--global-batch")) is not None and chosen(flags, "--batch-size") is None:
        # A run would use micro-batches of the default size. The plan tells whether larger ones fit.
        flags.append(f"--batch-size={max(1, count(batch) // own.world_size)}")
    if own.samples is not None:
        flags += ["--dataset-type", "synthetic", "--train-num-samples", str(own.samples)]
    elif chosen(flags, "--train-data") is None and chosen(flags, "--config") is None:
        raise UsageError("the number of samples is unknown: give --samples or --train-data")
    config, run = run_to_plan(flags, own.world_size)
    if run.data is None:
        raise UsageError("the run of --config has no --train-data: give --samples or --train-data")
    for line in Plan(run, build_on_meta(config, run), own.gpu_memory).report():
        print(line)


if __name__ == "__main__":
    command_line.run(main)
