"""How long the runs are and which come next: successive halving in equal rungs for all losses, then paired seeds."""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from openclip_ext.diagnostics.compare.space import Configuration, Setting

SEEDS = (0, 1, 2)
# Configurations of each loss that the final runs try: short runs of one seed do not tell the best from the second.
FINALISTS = 2
# The richest first: configurations of each loss in the rungs of the search, and their length as a share of the final runs'.
# Without rungs the finalists are the first candidates.
_Search = tuple[tuple[int, float], ...]
_SEARCHES: tuple[_Search, ...] = (((9, 1 / 8), (4, 1 / 4)), ((6, 1 / 4),), ((4, 1 / 4),), ((3, 1 / 4),), ())
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
        finalists: configurations of each loss in the final runs.
    """

    losses: tuple[str, ...]
    rungs: tuple[Rung, ...]
    final_samples: int
    seeds: tuple[int, ...] = SEEDS
    finalists: int = FINALISTS

    @classmethod
    def of_json(cls, content: Mapping[str, Any]) -> "Design":
        """The inverse of ``dataclasses.asdict`` and JSON."""
        rungs = tuple(Rung(**rung) for rung in content["rungs"])
        return cls(
            tuple(content["losses"]), rungs, content["final_samples"], tuple(content["seeds"]), content["finalists"]
        )

    @property
    def search_runs(self) -> int:
        """Runs of the search of each loss."""
        return sum(rung.configurations for rung in self.rungs)

    @property
    def final_runs(self) -> int:
        """Final runs of each loss."""
        return len(self.seeds) * self.finalists

    @property
    def shortest(self) -> int:
        """Samples of the shortest run."""
        return self.rungs[0].samples if self.rungs else self.final_samples

    def samples(self) -> int:
        """Samples of all runs together."""
        search = sum(rung.configurations * rung.samples for rung in self.rungs)
        return len(self.losses) * (search + self.final_runs * self.final_samples)


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
    finals = len(SEEDS) * min(FINALISTS, most_tried)
    for search in _SEARCHES:
        if search and search[0][0] > most_tried:
            continue
        runs = len(losses) * (sum(count for count, _ in search) + finals)
        free = seconds * processes - runs * costs.per_run - len(losses) * finals * costs.per_final
        per_final = sum(costs.per_sample.values()) * (sum(count * share for count, share in search) + finals)
        final = min(int(free / per_final), most_samples)
        design = _rounded(losses, search, final, batch, min(FINALISTS, most_tried))
        if design.shortest >= _LONG_ENOUGH_STEPS * batch or final == most_samples:
            return design
    if design.shortest < _LEAST_STEPS * batch:
        steps = max(0, design.shortest // batch)
        raise ValueError(
            f"the time is too short: {seconds / 60:.1f} minutes with {processes} processes leave {steps} steps for a short "
            f"run of each of {len(losses)} losses, at least {_LEAST_STEPS} are needed. Give more --minutes, fewer --losses, "
            "or a smaller --model"
        )
    return design


def _rounded(losses: Sequence[str], search: _Search, final: int, batch: int, finalists: int) -> Design:
    def whole_batches(samples: float) -> int:
        return int(samples // batch) * batch

    rungs = tuple(Rung(count, whole_batches(final * share)) for count, share in search)
    return Design(tuple(losses), rungs, whole_batches(final), finalists=finalists)


def plan_finals(design: Design, costs: Costs, seconds: float, processes: int, batch: int, most_samples: int) -> Design:
    """The design with the final runs as long as the time that is left allows, from the pace that was seen.

    They stay at least as long as the last rung: shorter ones would be worse than the search.
    """
    runs = len(design.losses) * design.final_runs
    free = seconds * processes - runs * (costs.per_run + costs.per_final)
    final = int(free / (sum(costs.per_sample[loss] for loss in design.losses) * design.final_runs))
    final = max(min(final, most_samples), *(rung.samples for rung in design.rungs), batch)
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
            kept = [run.configuration for run in self._ranked(runs, results)]

    def _finalists(self, loss: str, results: Results) -> list[Configuration]:
        """The best of the search, the best first; none while it is not over."""
        rungs = list(self.rungs(loss, results))
        if not self.design.rungs:
            return list(self.candidates[loss][: self.design.finalists])
        if len(rungs) < len(self.design.rungs) or any(run.id not in results for run in rungs[-1]):
            return []
        return [run.configuration for run in self._ranked(rungs[-1], results)[: self.design.finalists]]

    @staticmethod
    def _ranked(runs: Sequence[Run], results: Results) -> list[Run]:
        return sorted(runs, key=lambda run: -results[run.id]["choice"])

    def finals_of(self, loss: str, results: Results) -> list[list[Run]]:
        """A loss's final runs: those of each finalist, one of each seed; none while the search is not over."""
        samples = self.design.final_samples
        finalists = self._finalists(loss, results)
        return [[self._run(one, samples, seed, True) for seed in self.design.seeds] for one in finalists]

    def best(self, loss: str, results: Results) -> list[Run]:
        """The final runs of a loss's best finalist, as the seeds say that all finalists have finished."""
        finalists = self.finals_of(loss, results)
        complete = [runs for runs in zip(*finalists, strict=True) if all(run.id in results for run in runs)]
        totals = [sum(results[run.id]["choice"] for run in runs) for runs in zip(*complete, strict=True)]
        return finalists[totals.index(max(totals))] if totals else [run for runs in finalists[:1] for run in runs]

    def search(self, results: Results) -> list[Run]:
        """The search's runs that can start now, rung by rung, the losses in turn."""
        pending = []
        for loss in self.design.losses:
            for number, runs in enumerate(self.rungs(loss, results)):
                pending += [((number, place), run) for place, run in enumerate(runs) if run.id not in results]
        return [run for _, run in sorted(pending, key=lambda entry: entry[0])]

    def finals(self, results: Results) -> list[Run]:
        """All final runs of losses whose search is over, seed by seed, so that pairs are complete early."""
        runs = [run for loss in self.design.losses for runs in self.finals_of(loss, results) for run in runs]
        return sorted(runs, key=lambda run: self.design.seeds.index(run.seed))


def setting_words(setting: Setting) -> str:
    """A setting in a few words: ``τ learned, ρ 5``."""
    options = setting.options
    scheme = options.get("temperature_scheme", "global")
    words = [f"τ {'learned' if scheme == 'global' else scheme}"]
    words += [f"ρ {options['rho']:g}"] if "rho" in options else []
    if "temperature" in options:
        words.append(f"{options['temperature']:g}" if scheme == "constant" else f"from {options['temperature']:g}")
    return ", ".join(words)
