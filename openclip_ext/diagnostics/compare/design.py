"""How long the runs are and which come next: equal trials for all losses, then paired seeds of the best."""

import hashlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

from openclip_ext.diagnostics.compare.space import BASELINE, Configuration, Setting

SEEDS = (0, 1, 2)
# With time to spare.
MOST_SEEDS = 6
# Configurations of each loss that all seeds run: one run does not tell the best from the second.
FINALISTS = 2
# Losses beside the baseline that run all seeds: what is clearly behind after the first one only makes the runs shorter.
CONTENDERS = 2
# Shorter runs say nothing: they are hardly above chance.
_LEAST_STEPS = 20


class _Plan(NamedTuple):
    """How much of each loss is tried.

    Attributes:
        rungs: of a search by shorter runs: configurations, and their length as a share of the final runs'.
        tried: configurations in the final runs of the first seed.
        enough_steps: that the shortest runs must have. Without rungs, a length that ``--epochs`` limits is enough, too.
    """

    rungs: tuple[tuple[int, float], ...]
    tried: int
    enough_steps: float


# The richest first. Shorter runs prefer what is good in short runs, so they must be long themselves: on icons in batches of 32
# queueclip was 0.1 and 0.8 points ahead after 1,700 steps, 2.4 after 3,000 and 8.7 after 5,500 (docs/results.md).
_PLANS = (
    _Plan((), 9, math.inf),
    _Plan(((9, 1 / 8), (4, 1 / 4)), FINALISTS, 1500),
    _Plan(((6, 1 / 4),), FINALISTS, 1500),
    _Plan((), 4, 2500),
    _Plan((), 3, 1500),
    _Plan((), FINALISTS, _LEAST_STEPS),
)


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
        tried: configurations of each loss in the final runs of the first seed.
        finalists: the best of these, which the other seeds run, too.
        final_samples: samples that each final run sees; a guess until the search is over.
        seeds: of the final runs.
        contenders: losses beside the baseline that run the other seeds: the best with the first.
    """

    losses: tuple[str, ...]
    rungs: tuple[Rung, ...]
    tried: int
    finalists: int
    final_samples: int
    seeds: tuple[int, ...] = SEEDS
    contenders: int = CONTENDERS

    @classmethod
    def of_json(cls, content: Mapping[str, Any]) -> "Design":
        """The inverse of ``dataclasses.asdict`` and JSON."""
        lists = {name: tuple(content[name]) for name in ("losses", "seeds")}
        return cls(**{**content, **lists, "rungs": tuple(Rung(**rung) for rung in content["rungs"])})

    @property
    def search_runs(self) -> int:
        """Runs of the search, of all losses."""
        return len(self.losses) * sum(rung.configurations for rung in self.rungs)

    @property
    def continued(self) -> int:
        """Losses that run all seeds."""
        return min(len(self.losses), 1 + self.contenders)

    @property
    def runs_a_seed(self) -> int:
        """Final runs of each seed but the first, of all losses."""
        return self.continued * self.finalists

    @property
    def final_runs(self) -> int:
        """Final runs of all losses."""
        return len(self.losses) * self.tried + (len(self.seeds) - 1) * self.runs_a_seed

    @property
    def shortest(self) -> int:
        """Samples of the shortest run."""
        return self.rungs[0].samples if self.rungs else self.final_samples

    def samples(self) -> int:
        """Samples of all runs together."""
        search = sum(rung.configurations * rung.samples for rung in self.rungs)
        return len(self.losses) * search + self.final_runs * self.final_samples

    def seconds(self, costs: "Costs") -> tuple[float, float]:
        """Processor time beside the training, and what each sample of the final runs' length costs in all of them; at most,
        as the costliest losses may be the ones that go on."""
        fixed = self.final_runs * (costs.per_run + costs.per_final)
        others = sorted((costs.per_sample[loss] for loss in self.losses if loss != BASELINE), reverse=True)
        going_on = costs.per_sample[BASELINE] + sum(others[: self.contenders])
        per_sample = self.tried * (costs.per_sample[BASELINE] + sum(others))
        return fixed, per_sample + (len(self.seeds) - 1) * self.finalists * going_on


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
    for one in _PLANS:
        if one.rungs and one.rungs[0][0] > most_tried:
            continue
        design = _designed(one, losses, costs, seconds * processes, batch, most_samples, most_tried)
        is_longest = design.final_samples == most_samples // batch * batch
        if design.shortest >= one.enough_steps * batch or (is_longest and not one.rungs):
            return design
    raise ValueError(
        f"the time is too short: {max(0, seconds) / 60:.1f} minutes, after reading and measuring, with {processes} processes "
        f"leave {max(0, design.shortest // batch)} steps for a run of each of {len(losses)} losses, at least {_LEAST_STEPS} "
        "are needed. Give more --minutes, fewer --losses, or a smaller --model"
    )


def _designed(
    one: _Plan, losses: Sequence[str], costs: Costs, seconds: float, batch: int, most_samples: int, most_tried: int
) -> Design:
    """A plan with runs as long as the processor time allows."""
    rungs = tuple(Rung(count, 0) for count, _ in one.rungs)
    empty = Design(tuple(losses), rungs, min(one.tried, most_tried), min(FINALISTS, most_tried), 0)
    fixed, per_sample = empty.seconds(costs)
    fixed += empty.search_runs * costs.per_run
    per_sample += sum(count * share for count, share in one.rungs) * sum(costs.per_sample.values())
    final = min((seconds - fixed) / per_sample, most_samples)

    def whole_batches(samples: float) -> int:
        return int(samples // batch) * batch

    rungs = tuple(Rung(count, whole_batches(final * share)) for count, share in one.rungs)
    return replace(empty, rungs=rungs, final_samples=whole_batches(final))


def plan_finals(design: Design, costs: Costs, seconds: float, processes: int, batch: int, most_samples: int) -> Design:
    """The design with the final runs as long as the time that is left allows, from the pace that was seen.

    They stay at least as long as the last rung: shorter ones would be worse than the search.
    """
    fixed, per_sample = design.seconds(costs)
    final = int((seconds * processes - fixed) / per_sample)
    final = max(min(final, most_samples), *(rung.samples for rung in design.rungs), batch)
    return replace(design, final_samples=final // batch * batch)


def add_seed(design: Design, run_seconds: Mapping[str, float], seconds: float, processes: int) -> Design | None:
    """The design with one more seed; None if the time is too short, or there are seeds enough.

    Args:
        design: whose runs are all finished.
        run_seconds: of a final run, by loss, with all processes busy.
        seconds: that are left.
        processes: runs at a time.
    """
    rounds = math.ceil(design.runs_a_seed / processes)
    if len(design.seeds) >= MOST_SEEDS or rounds * max(run_seconds.values()) > seconds:
        return None
    return replace(design, seeds=(*design.seeds, max(design.seeds) + 1))


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

    def _tried(self, loss: str, results: Results) -> list[Run]:
        """The final runs of the first seed, the best of the search first; none while it is not over."""
        kept = list(self.candidates[loss])
        if self.design.rungs:
            rungs = list(self.rungs(loss, results))
            if len(rungs) < len(self.design.rungs) or any(run.id not in results for run in rungs[-1]):
                return []
            kept = [run.configuration for run in self._ranked(rungs[-1], results)]
        samples = self.design.final_samples
        return [self._run(one, samples, self.design.seeds[0], True) for one in kept[: self.design.tried]]

    @staticmethod
    def _ranked(runs: Sequence[Run], results: Results) -> list[Run]:
        return sorted(runs, key=lambda run: -results[run.id]["choice"])

    def left_behind(self, results: Results) -> tuple[str, ...] | None:
        """Losses that the first seed alone runs: all but the baseline and the best others with it. None while it is not over
        and there are more losses than go on."""
        others = [loss for loss in self.design.losses if loss != BASELINE]
        if len(others) <= self.design.contenders:
            return ()
        tried = {loss: self._tried(loss, results) for loss in others}
        if not all(runs and all(run.id in results for run in runs) for runs in tried.values()):
            return None
        best = {loss: max(results[run.id]["choice"] for run in runs) for loss, runs in tried.items()}
        return tuple(sorted(others, key=lambda loss: -best[loss])[self.design.contenders :])

    def finals_of(self, loss: str, results: Results) -> list[list[Run]]:
        """A loss's final runs: those of each configuration, one of each seed. The finalists come first, once they are known;
        the others have the first seed only, as all have of a loss that is left behind.
        """
        tried = self._tried(loss, results)
        if any(run.id not in results for run in tried):
            return [[run] for run in tried]
        ranked, count = self._ranked(tried, results), self.design.finalists
        behind = self.left_behind(results)
        if loss != BASELINE and (behind is None or loss in behind):
            return [[run] for run in ranked]
        finalists = [[replace(run, seed=seed) for seed in self.design.seeds] for run in ranked[:count]]
        return [*finalists, *([run] for run in ranked[count:])]

    def best(self, loss: str, results: Results) -> list[Run]:
        """The final runs of a loss's best finalist, as the seeds say that all finalists have finished."""
        finalists = self.finals_of(loss, results)[: self.design.finalists]
        complete = [runs for runs in zip(*finalists, strict=True) if all(run.id in results for run in runs)]
        totals = [sum(results[run.id]["choice"] for run in runs) for runs in zip(*complete, strict=True)]
        return finalists[totals.index(max(totals))] if totals else []

    def searched(self, results: Results) -> list[Run]:
        """The search's runs as far as they are decided, finished or not."""
        return [run for loss in self.design.losses for runs in self.rungs(loss, results) for run in runs]

    def search(self, results: Results) -> list[Run]:
        """The search's runs that can start now, rung by rung, the losses in turn."""
        pending = []
        for loss in self.design.losses:
            for number, runs in enumerate(self.rungs(loss, results)):
                pending += [((number, place), run) for place, run in enumerate(runs) if run.id not in results]
        return [run for _, run in sorted(pending, key=lambda entry: entry[0])]

    def finals(self, results: Results) -> list[Run]:
        """All final runs that are decided, seed by seed, the losses in turn, so that pairs are complete early."""
        runs = [
            ((self.design.seeds.index(run.seed), place), run)
            for loss in self.design.losses
            for place, of_one in enumerate(self.finals_of(loss, results))
            for run in of_one
        ]
        return [run for _, run in sorted(runs, key=lambda entry: entry[0])]


def setting_words(setting: Setting, own_scheme: str = "global") -> str:
    """A setting in a few words: ``τ learned, ρ 5``.

    Args:
        setting: of the temperature.
        own_scheme: the loss's, where the setting has none.
    """
    options = setting.options
    scheme = options.get("temperature_scheme", own_scheme)
    words = [f"τ {'learned' if scheme == 'global' else scheme}"]
    words += [f"ρ {options['rho']:g}"] if "rho" in options else []
    if "temperature" in options:
        words.append(f"{options['temperature']:g}" if scheme == "constant" else f"from {options['temperature']:g}")
    words += [f"γ {options['gamma']:g}"] if "gamma" in options else []
    words += ["MLP kept"] if options.get("reinitialize") is False else []
    return ", ".join(words)
