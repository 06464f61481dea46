"""How long the runs are and which come next: successive halving in equal rungs for all losses, then paired seeds."""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from openclip_ext.diagnostics.compare.space import Configuration, Setting

SEEDS = (0, 1, 2)
# The richest first: configurations of each loss in the rungs of the search, and their length as a share of the final runs'.
_SEARCHES = (((9, 1 / 9), (3, 1 / 3)), ((6, 1 / 6), (2, 1 / 3)), ((4, 1 / 4),), ((3, 1 / 3),), ((2, 1 / 3),))
# Shorter runs than this say nothing: they are hardly above chance.
_LEAST_STEPS = 20
_LONG_ENOUGH_STEPS = 400


@dataclass(frozen=True)
class Rung:
    """Runs of the search: so many configurations of each loss, on so many samples each."""

    configurations: int
    samples: int


@dataclass(frozen=True)
class Design:
    """The whole comparison.

    Attributes:
        losses: the candidates.
        rungs: of the search, the same for each loss.
        final_samples: samples that each final run sees; a guess until the search is over.
        seeds: of the final runs.
    """

    losses: tuple[str, ...]
    rungs: tuple[Rung, ...]
    final_samples: int
    seeds: tuple[int, ...] = SEEDS

    @classmethod
    def of_json(cls, content: Mapping[str, Any]) -> "Design":
        """The inverse of ``dataclasses.asdict`` and JSON."""
        rungs = tuple(Rung(**rung) for rung in content["rungs"])
        return cls(tuple(content["losses"]), rungs, content["final_samples"], tuple(content["seeds"]))

    def samples(self) -> int:
        """Samples of all runs together."""
        search = sum(rung.configurations * rung.samples for rung in self.rungs)
        return len(self.losses) * (search + len(self.seeds) * self.final_samples)


@dataclass(frozen=True)
class Costs:
    """Measured on this machine with all processes busy.

    Attributes:
        per_sample: seconds of training for each sample, by loss.
        per_run: seconds of a run beside its training: building and scoring.
        per_final: more seconds of a final run: its curve, and the normalizers.
    """

    per_sample: Mapping[str, float]
    per_run: float
    per_final: float


@dataclass(frozen=True)
class Run:
    """One training run.

    Attributes:
        context: digest of what all runs share: data, model, flags, versions.
        configuration: what is tried.
        lr: learning rate.
        seed: of start weights, order and augmentation.
        samples: that it sees.
        final: whether it counts in the comparison; else it is part of the search.
    """

    context: str
    configuration: Configuration
    lr: float
    seed: int
    samples: int
    final: bool

    @property
    def loss(self) -> str:
        return self.configuration.loss

    @property
    def id(self) -> str:
        """A digest of everything that the run follows from."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()[:16]


Results = Mapping[str, Mapping[str, Any]]


def plan(
    losses: Sequence[str], costs: Costs, seconds: float, processes: int, batch: int, most_samples: int, most_tried: int
) -> Design:
    """The design that fits into the time.

    Args:
        losses: the candidates.
        costs: of a run.
        seconds: of wall-clock time.
        processes: runs at a time.
        batch: samples of an optimizer step.
        most_samples: that a final run may see.
        most_tried: configurations that each loss has.

    Raises:
        ValueError: not even the smallest search fits.
    """
    design = None
    for search in _SEARCHES:
        if search[0][0] > most_tried:
            continue
        runs = len(losses) * (sum(count for count, _ in search) + len(SEEDS))
        free = seconds * processes - runs * costs.per_run - len(losses) * len(SEEDS) * costs.per_final
        per_final = sum(costs.per_sample.values()) * (sum(count * share for count, share in search) + len(SEEDS))
        final = min(int(free / per_final), most_samples)
        design = _rounded(losses, search, final, batch)
        if design.rungs[0].samples >= _LONG_ENOUGH_STEPS * batch or final == most_samples:
            return design
    if design is None or design.rungs[0].samples < _LEAST_STEPS * batch:
        steps = 0 if design is None else max(0, design.rungs[0].samples // batch)
        raise ValueError(
            f"the time is too short: {seconds / 60:.1f} minutes with {processes} processes leave {steps} steps for a short "
            f"run of each of {len(losses)} losses, at least {_LEAST_STEPS} are needed. Give more --minutes, fewer --losses, "
            "or a smaller --model"
        )
    return design


def _rounded(losses: Sequence[str], search: Sequence[tuple[int, float]], final: int, batch: int) -> Design:
    def whole_batches(samples: float) -> int:
        return int(samples // batch) * batch

    rungs = tuple(Rung(count, whole_batches(final * share)) for count, share in search)
    return Design(tuple(losses), rungs, whole_batches(final))


def plan_finals(design: Design, costs: Costs, seconds: float, processes: int, batch: int, most_samples: int) -> Design:
    """The design with the final runs as long as the time that is left allows, from the pace that was seen.

    They stay at least as long as the last rung: shorter ones would be worse than the search.
    """
    runs = len(design.losses) * len(design.seeds)
    free = seconds * processes - runs * (costs.per_run + costs.per_final)
    final = int(free / (sum(costs.per_sample[loss] for loss in design.losses) * len(design.seeds)))
    final = max(min(final, most_samples), design.rungs[-1].samples)
    return replace(design, final_samples=final // batch * batch)


class Schedule:
    """Which runs there are, as far as results decide it.

    Args:
        design: how many and how long.
        candidates: each loss's configurations, in order.
        context: see :class:`Run`.
        lr: the learning rate that the configurations' factors belong to.
    """

    def __init__(
        self, design: Design, candidates: Mapping[str, Sequence[Configuration]], context: str, lr: float
    ) -> None:
        self.design = design
        self.candidates = candidates
        self.context = context
        self.lr = lr

    def _run(self, configuration: Configuration, samples: int, seed: int, final: bool) -> Run:
        lr = self.lr * configuration.lr_factor
        return Run(self.context, configuration, lr, seed, samples, final)

    def rungs(self, loss: str, results: Results) -> Iterator[list[Run]]:
        """The search's runs of a loss, rung by rung as far as they are decided."""
        kept = list(self.candidates[loss])
        for rung in self.design.rungs:
            runs = [self._run(one, rung.samples, SEEDS[0], False) for one in kept[: rung.configurations]]
            yield runs
            if any(run.id not in results for run in runs):
                return
            kept = [run.configuration for run in sorted(runs, key=lambda run: -results[run.id]["choice"])]

    def best(self, loss: str, results: Results) -> Configuration | None:
        """A loss's best configuration; None while its search is not over."""
        rungs = list(self.rungs(loss, results))
        last = rungs[-1]
        if len(rungs) < len(self.design.rungs) or any(run.id not in results for run in last):
            return None
        return max(last, key=lambda run: results[run.id]["choice"]).configuration

    def search(self, results: Results) -> list[Run]:
        """The search's runs that can start now, rung by rung, the losses in turn."""
        pending = []
        for loss in self.design.losses:
            for number, runs in enumerate(self.rungs(loss, results)):
                pending += [((number, place), run) for place, run in enumerate(runs) if run.id not in results]
        return [run for _, run in sorted(pending, key=lambda entry: entry[0])]

    def finals(self, results: Results) -> list[Run]:
        """All final runs of losses whose search is over, seed by seed, so that pairs are complete early."""
        best = {loss: self.best(loss, results) for loss in self.design.losses}
        samples = self.design.final_samples
        return [
            self._run(configuration, samples, seed, True)
            for seed in self.design.seeds
            for configuration in best.values()
            if configuration is not None
        ]


def setting_words(setting: Setting) -> str:
    """A setting in a few words: ``τ learned, ρ 5``."""
    options = setting.options
    scheme = options.get("temperature_scheme", "global")
    words = [f"τ {'learned' if scheme == 'global' else scheme}"]
    words += [f"ρ {options['rho']:g}"] if "rho" in options else []
    if "temperature" in options:
        words.append(f"{options['temperature']:g}" if scheme == "constant" else f"from {options['temperature']:g}")
    return ", ".join(words)
