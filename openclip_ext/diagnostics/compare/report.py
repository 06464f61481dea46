"""From finished runs to numbers and words, as JSON and as Markdown."""

import json
import math
import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from openclip_ext.diagnostics.compare import space
from openclip_ext.diagnostics.compare.design import Results, Run, Schedule, setting_words
from openclip_ext.diagnostics.compare.pilot import IMAGE_TO_TEXT, TEXT_TO_IMAGE, ZERO_SHOT, unpacked
from openclip_ext.diagnostics.compare.space import BASELINE, Setting
from openclip_ext.diagnostics.compare.statistics import Difference, paired_difference

# A gain in R@1 that nobody would look for.
_NEGLIGIBLE = 0.01
_METRIC_WORDS = {IMAGE_TO_TEXT: "image to text", TEXT_TO_IMAGE: "text to image", ZERO_SHOT: "zero-shot"}


@dataclass(frozen=True)
class About:
    """What was compared.

    Attributes:
        data, model, batch, num_samples: of the training.
        notes: what to know about the data.
        cpu: whether there was no GPU.
        processes: runs at a time.
        minutes: that the comparison was given.
        most_epochs: no final run is longer; below --epochs where a remainder fills no batch.
        groups: equal numbers for validation samples of equal captions.
    """

    data: str
    model: str
    batch: int
    num_samples: int
    notes: tuple[str, ...]
    cpu: bool
    processes: int
    minutes: float
    most_epochs: float
    groups: Sequence[int]

    @property
    def chance(self) -> float:
        """R@1 of guessing, the mean of both directions: captions are ranked once each, any image of a caption is right."""
        counts = Counter(self.groups).values()
        return (1 / len(counts) + sum(count**2 for count in counts) / len(self.groups) ** 2) / 2


@dataclass(frozen=True)
class LossResult:
    """A loss's final runs.

    Attributes:
        loss: its name.
        setting: the best temperature setting, in words.
        lr: the best learning rate.
        scores: mean over seeds by metric; ``R@1`` is the mean of both directions.
        each_seed: R@1 of each seed.
        gain: R@1 minus that of ``openclip``, the mean over the seeds that both have, or None.
        difference: the same with its interval, or None with fewer than two such seeds.
        zero_shot_difference: the same for zero-shot accuracy.
        temperature: at the end.
        step_seconds: of training, with all processes busy.
        memory_bytes, state_bytes: peak of a run; of the loss's state.
        curves: ``(samples, seconds, R@1)`` of each seed.
        normalizers: errors of its and the batch's log-normalizers, at the end of the first seed.
        command: the training command line.
    """

    loss: str
    setting: str
    lr: float
    scores: Mapping[str, float]
    each_seed: tuple[float, ...]
    gain: float | None
    difference: Difference | None
    zero_shot_difference: Difference | None
    temperature: float
    step_seconds: float
    memory_bytes: int
    state_bytes: int
    curves: tuple[tuple[tuple[float, float, float], ...], ...]
    normalizers: Mapping[str, Any] | None
    command: str


@dataclass(frozen=True)
class Report:
    """What the files say.

    Attributes:
        about: what was compared.
        sentence: the result.
        recommended: name of the loss to take, or None.
        text_of_judgement: how wrong a batch is, before training.
        results: by loss, the best first.
        tried: the search: ``(loss, setting, lr, samples, mean reciprocal rank)``.
        final_runs: of each configuration, means over so many seeds: ``(loss, setting, lr, seeds, mean reciprocal rank, R@1)``.
        unfinished: how many runs are missing.
        failures: messages.
        final_samples: that each final run saw.
        epochs: the same, in epochs.
        left_behind: losses that have run the first seed only.
    """

    about: About
    sentence: str
    recommended: str | None
    text_of_judgement: str
    results: tuple[LossResult, ...]
    tried: tuple[tuple[str, str, float, int, float], ...]
    final_runs: tuple[tuple[str, str, float, int, float, float], ...]
    unfinished: int
    failures: tuple[str, ...]
    final_samples: int
    epochs: float
    left_behind: tuple[str, ...]


def make_report(
    about: About,
    schedule: Schedule,
    results: Results,
    plan: Mapping[str, Any],
    command_line: Callable[[Mapping[str, Any]], str],
) -> Report:
    """The report of what is finished.

    Args:
        about: what was compared.
        schedule: which runs there are.
        results: finished and failed runs by id.
        plan: what was measured before the first run.
        command_line: of a run.
    """
    of_loss = {loss: finished(schedule.best(loss, results), results) for loss in schedule.design.losses}
    found = [
        _loss_result(loss, lines, of_loss[BASELINE], about, command_line) for loss, lines in of_loss.items() if lines
    ]
    found.sort(key=lambda result: -_gain(result))
    design = schedule.design
    # Equal epochs of whole batches are a little shorter than what was planned.
    lengths = [line["length"] for lines in of_loss.values() for line in lines.values()]
    samples = max((length["epochs"] * length["epoch_samples"] for length in lengths), default=design.final_samples)
    epochs = samples / about.num_samples
    failures = [line["failed"].strip() for line in results.values() if "failed" in line]
    to_best = _differences_to_best(found, of_loss, about)
    sentence, recommended = conclude(found, about, epochs, to_best, len(failures))
    finals = [finished(runs, results) for loss in of_loss for runs in schedule.finals_of(loss, results)]
    tried = [line for run in schedule.searched(results) for line in finished([run], results).values()]
    return Report(
        about=about,
        sentence=sentence,
        recommended=recommended,
        text_of_judgement=judgement(plan["judged"], about.batch, "Before training"),
        results=tuple(found),
        tried=tuple(
            (line["configuration"]["loss"], _words(line), line["lr"], line["samples"], line["choice"]) for line in tried
        ),
        final_runs=tuple(_final_row(list(lines.values())) for lines in finals if lines),
        unfinished=design.search_runs + design.final_runs - len(tried) - sum(map(len, finals)),
        failures=tuple(sorted(set(failures))),
        final_samples=samples,
        epochs=epochs,
        left_behind=schedule.left_behind(results) or (),
    )


def finished(runs: Sequence[Run], results: Results) -> dict[int, Mapping[str, Any]]:
    """The lines of finished runs by seed."""
    found = {run.seed: results[run.id] for run in runs if run.id in results}
    return {seed: line for seed, line in found.items() if "failed" not in line}


def _final_row(lines: Sequence[Mapping[str, Any]]) -> tuple[str, str, float, int, float, float]:
    choice = statistics.fmean(line["choice"] for line in lines)
    score = statistics.fmean(float(_recall(line).mean()) for line in lines)
    return lines[0]["configuration"]["loss"], _words(lines[0]), lines[0]["lr"], len(lines), choice, score


def _words(line: Mapping[str, Any]) -> str:
    configuration = line["configuration"]
    return setting_words(Setting(**configuration["setting"]), space.own_scheme(configuration["loss"]))


def _loss_result(
    loss: str,
    lines: Mapping[int, Mapping[str, Any]],
    baseline: Mapping[int, Mapping[str, Any]],
    about: About,
    command_line: Callable[[Mapping[str, Any]], str],
) -> LossResult:
    every = list(lines.values())
    scores = {
        name: float(torch.stack([unpacked(line["hits"][name]) for line in every]).mean()) for name in every[0]["hits"]
    }
    each_seed = tuple(float(_recall(line).mean()) for line in every)
    gains = [float(_recall(lines[seed]).mean() - _recall(baseline[seed]).mean()) for seed in lines if seed in baseline]
    return LossResult(
        loss=loss,
        setting=_words(every[0]),
        lr=every[0]["lr"],
        scores={"R@1": statistics.fmean(each_seed)} | scores,
        each_seed=each_seed,
        gain=statistics.fmean(gains) if gains else None,
        difference=_difference(lines, baseline, about, _recall) if loss != BASELINE else None,
        zero_shot_difference=_difference(lines, baseline, about, _zero_shot)
        if loss != BASELINE and ZERO_SHOT in scores
        else None,
        temperature=statistics.fmean(line["temperature"] for line in every),
        step_seconds=sum(line["seconds"] for line in every) / sum(line["steps"] for line in every),
        memory_bytes=max(line["memory_bytes"] for line in every),
        state_bytes=every[0]["state_bytes"],
        curves=tuple(tuple((point[0], point[1], point[2]) for point in line["curve"]) for line in every),
        normalizers=next((line["normalizers"] for line in every if "normalizers" in line), None),
        command=command_line(every[0]),
    )


def _recall(line: Mapping[str, Any]) -> Tensor:
    return (unpacked(line["hits"][IMAGE_TO_TEXT]) + unpacked(line["hits"][TEXT_TO_IMAGE])) / 2


def _zero_shot(line: Mapping[str, Any]) -> Tensor:
    return unpacked(line["hits"][ZERO_SHOT])


def _difference(
    first: Mapping[int, Mapping[str, Any]],
    second: Mapping[int, Mapping[str, Any]],
    about: About,
    metric: Callable[[Mapping[str, Any]], Tensor],
) -> Difference | None:
    seeds = [seed for seed in first if seed in second]
    if not seeds:
        return None
    stacked = [torch.stack([metric(lines[seed]) for seed in seeds]) for lines in (first, second)]
    return paired_difference(stacked[0], stacked[1], about.groups)


def _differences_to_best(
    found: Sequence[LossResult], of_loss: Mapping[str, Mapping[int, Mapping[str, Any]]], about: About
) -> dict[str, Difference | None]:
    if not found:
        return {}
    best = of_loss[_leader(found).loss]
    return {result.loss: _difference(best, of_loss[result.loss], about, _recall) for result in found}


# --- words -----------------------------------------------------------------------------------------------------------


def _leader(found: Sequence[LossResult]) -> LossResult:
    """The best of those that beat the baseline with confidence; if there are none, the best."""
    sure = [result for result in found if result.difference is not None and result.difference.is_positive]
    return max(sure or found, key=_gain)


def _gain(result: LossResult) -> float:
    return -math.inf if result.gain is None else result.gain


def conclude(
    found: Sequence[LossResult],
    about: About,
    epochs: float,
    to_best: Mapping[str, Difference | None],
    failures: int = 0,
) -> tuple[str, str | None]:
    """The result in a sentence, and the loss to take.

    Args:
        found: the losses with final runs.
        about: what was compared.
        epochs: of a final run.
        to_best: the difference of the best loss to each.
        failures: runs that failed.
    """
    others = [result for result in found if result.difference is not None]
    if not any(result.loss == BASELINE for result in found) or not others:
        why = f": {failures} runs failed, for the reasons below, and" if failures else " yet:"
        goes_on = "runs them again" if failures else "goes on from here"
        return f"No result{why} there are fewer than two paired final runs; the same command {goes_on}.", None
    best = _leader(others)
    assert best.difference is not None
    difference = f"{points(best.difference)} R@1"
    if not best.difference.is_positive:
        worse = [result.loss for result in others if result.difference and result.difference.high < 0]
        sentence = (
            f"Nothing beats {BASELINE} with confidence at batch {about.batch}: {best.loss} comes nearest, {difference}"
        )
        sentence += f"; worse: {', '.join(worse)}" if worse else ""
        # Runs end with a whole batch, a little before --epochs.
        could_be_longer = epochs < 0.9 * about.most_epochs
        is_open = could_be_longer and best.difference.high > _NEGLIGIBLE
        advice = f"{_left_open(epochs, about)} Until then take" if is_open else "Take"
        return f"{sentence}. {advice} {BASELINE} with its best setting.", BASELINE
    sentence = f"{best.loss}, {difference} over {BASELINE} at batch {about.batch}"
    equal = [
        loss
        for loss, gap in to_best.items()
        if loss not in (best.loss, BASELINE) and gap is not None and not gap.is_clear
    ]
    if equal:
        sentence += f"; no difference between {best.loss} and {', '.join(equal)}"
    return f"{sentence}.", best.loss


def _left_open(epochs: float, about: About) -> str:
    longer = min(2.0, about.most_epochs / epochs)
    return (
        f"Runs of {epochs:.1f} epochs leave open what longer ones bring: with another --output and --minutes "
        f"{math.ceil(longer * about.minutes)} they have about {longer * epochs:.0f}."
    )


def points(difference: Difference) -> str:
    """In points, with the interval: ``+4.1 (3.2 to 5.0)``."""
    return f"{_signed(difference.mean)} ({_plain(difference.low)} to {_plain(difference.high)})"


def _signed(value: float) -> str:
    return f"{100 * value:+.1f}".replace("-", "−")


def _plain(value: float) -> str:
    return f"{100 * value:.1f}".replace("-", "−")


def _rough(value: float) -> str:
    """Two digits, without an exponent."""
    return f"{float(f'{value:.2g}'):,g}"


def judgement(measured: Mapping[str, Any], batch: int, when: str) -> str:
    """How wrong a batch is about its normalizers."""
    error = measured["batch"]
    return (
        f"{when}, at temperature {measured['temperature']:.3f}: your batch of {batch} misjudges its normalizer by a factor of "
        f"{_rough(error['factor'])} (90 %: {_rough(error['factor_low'])} to {_rough(error['factor_high'])}), against "
        f"{measured['samples']:,} training samples."
    )


# --- the whole report ------------------------------------------------------------------------------------------------


def to_json(report: Report) -> str:
    """All numbers of the report."""
    content = asdict(report)
    del content["about"]["groups"]
    return json.dumps(content, indent=2) + "\n"


def lines(report: Report) -> list[str]:
    """Paragraphs that explain the numbers."""
    about = report.about
    memory = "the process's resident memory" if about.cpu else "GPU memory taken by tensors"
    found = [
        f"{about.model} on {about.data} ({about.num_samples:,} samples), batches of {about.batch}. Scored on: "
        f"{'; '.join(about.notes)}. One half chose the hyper-parameters; the other half gives the numbers here. "
        f"Guessing scores {100 * about.chance:.2f} R@1. Pairs of equal captions count as right.",
        "All losses had the same start weights, order, augmentation and samples, and equally many configurations in the "
        "search and in the final runs. The choosing half's mean reciprocal rank (MRR) of all seeds says which of a loss's "
        "finalists counts. "
        f"The final runs saw {report.final_samples:,} samples each "
        f"({report.epochs:.1f} epochs): a longer training may rank the losses otherwise.",
        "Intervals are 95 % each and cover other seeds (Student's t over the paired seeds) and other validation samples "
        "of this kind, added as independent. They cover neither other data, nor other lengths of training, nor the "
        "choice among several losses and settings.",
        f"Seconds a step were measured with {about.processes} runs at a time; memory is the peak of {memory}.",
    ]
    if report.left_behind:
        found.append(
            f"{', '.join(report.left_behind)}: behind with the first seed, so not run with the others, for longer runs of the "
            f"rest. Their differences are to {BASELINE} with that seed."
        )
    if report.unfinished:
        found.append(f"Unfinished: {report.unfinished} runs are missing. The same command goes on from here.")
    return [*found, *(f"A run failed: {failure}" for failure in report.failures)]


def _shown_difference(result: LossResult) -> str:
    if result.difference is not None:
        return points(result.difference)
    return "" if result.gain is None else f"{_signed(result.gain)}, one seed"


def tables(report: Report) -> dict[str, list[list[str]]]:
    """The tables by title; the first row is the head."""
    metrics = [name for name in _METRIC_WORDS if report.results and name in report.results[0].scores]
    result = [
        ["loss", "R@1", f"minus {BASELINE}", *(_METRIC_WORDS[name] for name in metrics), "each seed", "setting", "lr"]
    ]
    cost = [["loss", "ms a step", "memory, MiB", "state of the loss, MiB", "τ at the end"]]
    errors = [["model trained with", "τ", "batch misjudges by (90 %)", "error of the batch", "error of the loss"]]
    for one in report.results:
        shown = "" if one.loss == BASELINE else _shown_difference(one)
        scores = [_plain(one.scores[name]) for name in metrics]
        if metrics and one.zero_shot_difference is not None:
            scores[-1] += f", {points(one.zero_shot_difference)}"
        seeds = " ".join(map(_plain, one.each_seed))
        result.append([one.loss, _plain(one.scores["R@1"]), shown, *scores, seeds, one.setting, f"{one.lr:g}"])
        mib = [f"{value / 2**20:.1f}" for value in (one.memory_bytes, one.state_bytes)]
        cost.append([one.loss, f"{1000 * one.step_seconds:.1f}", *mib, f"{one.temperature:.3f}"])
        if one.normalizers is not None:
            batch = one.normalizers["batch"]
            factor = f"{_rough(batch['factor'])} ({_rough(batch['factor_low'])} to {_rough(batch['factor_high'])})"
            pair = [f"{one.normalizers.get(name, batch)['mean']:.3f}" for name in ("own_batch", "own")]
            errors.append([one.loss, f"{one.normalizers['temperature']:.3f}", factor, *pair])
    tried = [["loss", "setting", "lr", "samples", "MRR, choosing half"]]
    tried += [
        [loss, words, f"{lr:g}", f"{samples:,}", _plain(score)] for loss, words, lr, samples, score in report.tried
    ]
    finals = [["loss", "setting", "lr", "seeds", "MRR, choosing half", "R@1"]]
    finals += [
        [loss, words, f"{lr:g}", str(seeds), _plain(choice), _plain(score)]
        for loss, words, lr, seeds, choice, score in report.final_runs
    ]
    found = {
        "Result": result,
        "Normalizers of the trained models": errors,
        "Cost": cost,
        "Final runs": finals,
        "Search": tried,
    }
    return {title: rows for title, rows in found.items() if len(rows) > 1}


def markdown(report: Report) -> str:
    """The report as Markdown."""
    parts = ["# Which loss?", f"**{report.sentence}**", report.text_of_judgement]
    chosen = next((one for one in report.results if one.loss == report.recommended), None)
    if chosen is not None:
        parts += ["Train the recommended configuration, at the pilot's length:", f"```bash\n{chosen.command}\n```"]
    for title, rows in tables(report).items():
        parts.append(f"## {title}")
        head, *body = rows
        parts.append("\n".join("| " + " | ".join(row) + " |" for row in [head, ["---"] * len(head), *body]))
    return "\n\n".join([*parts, "## Reading it", *lines(report)]) + "\n"
