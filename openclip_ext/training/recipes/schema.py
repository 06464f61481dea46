"""What a recipe is. Nothing heavy is imported here: reading recipes needs no torch."""

import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from openclip_ext.losses.options import flag_of

Value = int | float | str | bool | None


@dataclass(frozen=True)
class Result:
    """A published number.

    Attributes:
        metric: what was measured, as the table's column calls it.
        value: in percent.
        source: paper and table.
        spread: standard deviation over the paper's runs with different seeds, or None for a single run.
    """

    metric: str
    value: float
    source: str
    spread: float | None = None

    def __str__(self) -> str:
        spread = "" if self.spread is None else f" ± {self.spread:.2f}"
        return f"{self.metric} {self.value:.2f}{spread} ({self.source})"


@dataclass(frozen=True)
class Recipe:
    """The published settings of one loss on one data set, as a command line.

    Attributes:
        dataset: the name ``--recipe`` takes.
        loss: the name ``--loss`` takes.
        openclip_flags: OpenCLIP's flags without the leading hyphens; True stands for a flag without a value.
        loss_options: options of ``openclip_ext.create_loss``.
        gpus: number of GPUs that ``batch-size``, which is per GPU, belongs to.
        dataset_size: image-text pairs the source trained on.
        samples_seen: the source's training budget, in pairs.
        source: papers, tables and released commands the values come from.
        results: what the source reports.
        notes: what the source leaves open, and what stands here instead.
    """

    dataset: str
    loss: str
    openclip_flags: Mapping[str, Value]
    loss_options: Mapping[str, Value]
    gpus: int
    dataset_size: int
    samples_seen: int
    source: str
    results: tuple[Result, ...] = ()
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in ("openclip_flags", "loss_options"):
            object.__setattr__(self, name, MappingProxyType(dict(getattr(self, name))))

    @property
    def global_batch(self) -> int:
        """Pairs in one optimizer step, over all GPUs."""
        size = self.openclip_flags["batch-size"]
        assert isinstance(size, int), "the batch of a recipe is a number"
        return size * self.gpus

    def argv(self) -> list[str]:
        """The recipe as arguments of ``openclip_ext.training.main``; what follows them on a command line wins."""
        arguments = ["--loss", self.loss]
        for flag, value in self.openclip_flags.items():
            arguments += _as_arguments(f"--{flag}", value)
        for option, value in self.loss_options.items():
            arguments += _as_arguments(flag_of(option), value)
        return arguments

    def launch_command(self) -> str:
        """The command that starts the recipe on one machine with ``gpus`` GPUs."""
        return shlex.join(
            [
                *("torchrun", "--nproc-per-node", str(self.gpus), "-m", "--", "openclip_ext.training.main"),
                *("--recipe", self.dataset, "--loss", self.loss, "--name", f"{self.dataset}-{self.loss}"),
                *("--train-data", f"PATH/TO/{self.dataset}/{{00000..LAST}}.tar"),
            ]
        )

    def __str__(self) -> str:
        budget = f"{self.dataset_size / 1e6:.4g} M pairs, {self.samples_seen / 1e6:.4g} M seen"
        lines = [
            f"{self.dataset}, {self.loss}: {budget}, batch {self.global_batch} on {self.gpus} GPU(s)",
            f"  launch:   {self.launch_command()}",
            f"  sets:     {shlex.join(self.argv())}",
            *(f"  expected: {result}" for result in self.results),
            f"  source:   {self.source}",
            *(f"  open:     {note}" for note in self.notes),
        ]
        return "\n".join(lines)


def _as_arguments(flag: str, value: Value) -> list[str]:
    if value is True:
        return [flag]
    if value is False:
        return ["--no-" + flag.removeprefix("--")]
    # An equals sign, since argparse would take a negative number in an argument of its own for a flag.
    return [f"{flag}={'none' if value is None else value}"]
