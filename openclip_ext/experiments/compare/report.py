"""From finished runs to numbers and words, as Markdown and as one HTML page without external resources."""

import math
import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from openclip_ext.experiments.compare.pilot import IMAGE_TO_TEXT, RETRIEVAL, TEXT_TO_IMAGE, ZERO_SHOT, unpack
from openclip_ext.experiments.compare.space import BASELINE, setting_words
from openclip_ext.experiments.runs import Contest, Results, Run, score
from openclip_ext.experiments.statistics import Difference, paired_difference
from openclip_ext.experiments.tables import markdown_table
from openclip_ext.pages.charts import Curve, color, line_chart
from openclip_ext.pages.rendering import render_lines, render_page

# A gain in R@1 that nobody would look for.
_NEGLIGIBLE = 0.01
_METRIC_WORDS = {IMAGE_TO_TEXT: "image to text", TEXT_TO_IMAGE: "text to image", ZERO_SHOT: "zero-shot"}

Row = Mapping[str, Any]


@dataclass(frozen=True)
class About:
    """What was compared: the training, what to know about the data, and the limits of time.

    No run is longer than ``most_epochs``, which is below --epochs where a remainder fills no batch.
    """

    data: str
    model: str
    batch: int
    num_samples: int
    notes: tuple[str, ...]
    processes: int
    minutes: float
    most_epochs: float


@dataclass(frozen=True)
class LossResult:
    """A loss's runs with its best setting.

    Attributes:
        scores: mean over seeds by metric; ``R@1`` is the mean of both directions.
        each_seed: R@1 of each seed.
        gain: R@1 minus that of ``openclip``, the mean over the seeds that both have, or None.
        difference: the same with its interval, or None with fewer than two such seeds.
        zero_shot_difference: the same for zero-shot accuracy.
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
    curves: Sequence[Sequence[tuple[float, float, float]]]
    normalizers: Mapping[str, Any] | None
    command: str


@dataclass(frozen=True)
class Report:
    """What the files say.

    Attributes:
        recommended: the loss to take.
        text_of_judgement: how wrong a batch is, before training.
        results: by loss, the best first.
        runs: means of each setting over its seeds: ``(loss, setting, lr, seeds, mean reciprocal rank, R@1)``.
        samples, epochs: that each run saw.
        left_behind: losses that have run the first seed only.
        chance: R@1 of guessing.
    """

    about: About
    sentence: str
    recommended: str | None
    text_of_judgement: str
    results: tuple[LossResult, ...]
    runs: tuple[tuple[str, str, float, int, float, float], ...]
    unfinished: int
    failures: tuple[str, ...]
    samples: int
    epochs: float
    left_behind: tuple[str, ...]
    chance: float


def make_report(
    about: About,
    contest: Contest,
    results: Results,
    planned_runs: int,
    judged: Mapping[str, Any],
    captions: Sequence[str],
    command_line: Callable[[Row], str],
) -> Report:
    """Return the report of what is finished.

    Args:
        about: what was compared.
        contest: which runs there are.
        results: rows of finished and failed runs.
        planned_runs: how many there will be.
        judged: how wrong a batch was about its normalizers before the first run.
        captions: of the samples that give the numbers.
        command_line: of a run.
    """
    number = {caption: place for place, caption in enumerate(dict.fromkeys(captions))}
    groups = [number[caption] for caption in captions]
    of_loss = {loss: _finished(contest.best(loss, results), results) for loss in contest.families}
    found = [
        _loss_result(loss, rows, of_loss[BASELINE], groups, command_line) for loss, rows in of_loss.items() if rows
    ]
    found.sort(key=lambda result: -_gain(result))
    first = next(iter(contest.families.values()))[0]
    samples = first.epochs * (first.epoch_samples or about.num_samples)
    epochs = samples / about.num_samples
    failures = [row["failed"].strip() for row in results.values() if "failed" in row]
    best = of_loss[_leader(found).loss] if found else {}
    to_best = {result.loss: _difference(best, of_loss[result.loss], groups) for result in found}
    sentence, recommended = conclude(found, about, epochs, to_best, len(failures))
    by_setting = [
        list(_finished(runs, results).values()) for loss in of_loss for runs in contest.by_setting(loss, results)
    ]
    return Report(
        about=about,
        sentence=sentence,
        recommended=recommended,
        text_of_judgement=judgement(judged, about.batch, "Before training"),
        results=tuple(found),
        runs=tuple(_setting_row(rows) for rows in by_setting if rows),
        unfinished=planned_runs - sum(map(len, by_setting)),
        failures=tuple(sorted(set(failures))),
        samples=samples,
        epochs=epochs,
        left_behind=contest.left_behind(results) or (),
        chance=chance(groups),
    )


def chance(groups: Sequence[int]) -> float:
    """Return R@1 of guessing, the mean of both directions, for samples of which equal numbers have equal captions.

    Captions are ranked once each, and any image of a caption is right.
    """
    counts = Counter(groups).values()
    return (1 / len(counts) + sum(count**2 for count in counts) / len(groups) ** 2) / 2


def _finished(runs: Sequence[Run], results: Results) -> dict[int, Row]:
    """Return the rows of finished runs by seed."""
    found = {run.seed: results[run.id] for run in runs if run.id in results}
    return {seed: row for seed, row in found.items() if "failed" not in row}


def _setting_row(rows: Sequence[Row]) -> tuple[str, str, float, int, float, float]:
    recall = statistics.fmean(_recall(row) for row in rows)
    first = rows[0]
    words = setting_words(first["family"], first["setting"]["options"])
    return first["family"], words, first["lr"], len(rows), statistics.fmean(map(score, rows)), recall


def _loss_result(
    loss: str,
    rows: Mapping[int, Row],
    baseline: Mapping[int, Row],
    groups: Sequence[int],
    command_line: Callable[[Row], str],
) -> LossResult:
    every = list(rows.values())
    _, setting, lr, *_ = _setting_row(every)
    scores = {
        name: float(torch.stack([unpack(row["hits"][name]) for row in every]).mean()) for name in every[0]["hits"]
    }
    each_seed = tuple(_recall(row) for row in every)
    gains = [_recall(rows[seed]) - _recall(baseline[seed]) for seed in rows if seed in baseline]
    paired = {} if loss == BASELINE else rows
    return LossResult(
        loss=loss,
        setting=setting,
        lr=lr,
        scores={"R@1": statistics.fmean(each_seed)} | scores,
        each_seed=each_seed,
        gain=statistics.fmean(gains) if gains else None,
        difference=_difference(paired, baseline, groups),
        zero_shot_difference=_difference(paired, baseline, groups, (ZERO_SHOT,)) if ZERO_SHOT in scores else None,
        temperature=statistics.fmean(row["temperature"] for row in every),
        step_seconds=sum(row["seconds"] for row in every) / sum(row["steps"] for row in every),
        memory_bytes=max(row["memory_bytes"] for row in every),
        state_bytes=every[0]["state_bytes"],
        curves=[row["curve"] for row in every],
        normalizers=next((row["normalizers"] for row in every if "normalizers" in row), None),
        command=command_line(every[0]),
    )


def _hits(row: Row, metrics: Sequence[str]) -> Tensor:
    """Return each sample's hits ``(N,)``, the mean of some metrics."""
    return torch.stack([unpack(row["hits"][name]) for name in metrics]).mean(dim=0)


def _recall(row: Row) -> float:
    return float(_hits(row, RETRIEVAL).mean())


def _difference(
    first: Mapping[int, Row], second: Mapping[int, Row], groups: Sequence[int], metrics: Sequence[str] = RETRIEVAL
) -> Difference | None:
    seeds = [seed for seed in first if seed in second]
    if not seeds:
        return None
    stacked = [torch.stack([_hits(rows[seed], metrics) for seed in seeds]) for rows in (first, second)]
    return paired_difference(stacked[0], stacked[1], groups)


# --- words -----------------------------------------------------------------------------------------------------------


def _leader(found: Sequence[LossResult]) -> LossResult:
    """Return the best of those that beat the baseline with confidence; if there are none, the best."""
    sure = [result for result in found if result.difference is not None and result.difference.low > 0]
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
    """Return the result in a sentence, and the loss to take.

    Args:
        found: the losses with finished runs.
        about: what was compared.
        epochs: of a run.
        to_best: the difference of the best loss to each.
        failures: how many runs failed.
    """
    others = [result for result in found if result.difference is not None]
    if not any(result.loss == BASELINE for result in found) or not others:
        why = f": {failures} runs failed, for the reasons below, and" if failures else " yet:"
        goes_on = "runs them again" if failures else "goes on from here"
        return f"No result{why} there are fewer than two paired runs; the same command {goes_on}.", None
    best = _leader(others)
    assert best.difference is not None
    difference = f"{points(best.difference)} R@1"
    if best.difference.low > 0:
        sentence = f"{best.loss}, {difference} over {BASELINE} at batch {about.batch}"
        gaps = {loss: gap for loss, gap in to_best.items() if gap is not None and loss not in (best.loss, BASELINE)}
        equal = [loss for loss, gap in gaps.items() if gap.low <= 0 <= gap.high]
        sentence += f"; no difference between {best.loss} and {', '.join(equal)}" if equal else ""
        return f"{sentence}.", best.loss
    sentence = (
        f"Nothing beats {BASELINE} with confidence at batch {about.batch}: {best.loss} comes nearest, {difference}"
    )
    worse = [result.loss for result in others if result.difference and result.difference.high < 0]
    sentence += f"; worse: {', '.join(worse)}" if worse else ""
    # Runs end with a whole batch, a little before --epochs.
    advice = "Take"
    if epochs < 0.9 * about.most_epochs and best.difference.high > _NEGLIGIBLE:
        longer = min(2.0, about.most_epochs / epochs)
        advice = (
            f"Runs of {epochs:.1f} epochs leave open what longer ones bring: with another --output and --minutes "
            f"{math.ceil(longer * about.minutes)} they have about {longer * epochs:.0f}. Until then take"
        )
    return f"{sentence}. {advice} {BASELINE} with its best setting.", BASELINE


def points(difference: Difference) -> str:
    """Return a difference in points, with its interval: ``+4.1 (3.2 to 5.0)``."""
    return f"{_signed(difference.mean)} ({_plain(difference.low)} to {_plain(difference.high)})"


def _plain(value: float, form: str = ".1f") -> str:
    return f"{100 * value:{form}}".replace("-", "−")


def _signed(value: float) -> str:
    return _plain(value, "+.1f")


def _factor(error: Mapping[str, float]) -> list[str]:
    """Return the factor and its 90 % range in two digits, without exponents."""
    return [f"{float(f'{error[name]:.2g}'):,g}" for name in ("factor", "factor_low", "factor_high")]


def judgement(measured: Mapping[str, Any], batch: int, when: str) -> str:
    """Return how wrong a batch is about its normalizers, in words."""
    median, low, high = _factor(measured["batch"])
    return (
        f"{when}, at temperature {measured['temperature']:.3f}: your batch of {batch} misjudges its normalizer by a factor of "
        f"{median} (90 %: {low} to {high}), against {measured['samples']:,} training samples."
    )


# --- the whole report ------------------------------------------------------------------------------------------------


def lines(report: Report) -> list[str]:
    """Return paragraphs that explain the numbers."""
    return render_lines("compare.txt", report=report, on_gpu=torch.cuda.is_available())


def _shown_difference(result: LossResult) -> str:
    if result.difference is not None:
        return points(result.difference)
    return "" if result.loss == BASELINE or result.gain is None else f"{_signed(result.gain)}, one seed"


def tables(report: Report) -> dict[str, list[list[str]]]:
    """Return the tables by title; the first row is the head."""
    metrics = [name for name in _METRIC_WORDS if report.results and name in report.results[0].scores]
    words = [_METRIC_WORDS[name] for name in metrics]
    result = [["loss", "R@1", f"minus {BASELINE}", *words, "each seed", "setting", "lr"]]
    cost = [["loss", "ms a step", "memory, MiB", "state of the loss, MiB", "τ at the end"]]
    errors = [["model trained with", "τ", "batch misjudges by (90 %)", "error of the batch", "error of the loss"]]
    for one in report.results:
        scores = [_plain(one.scores[name]) for name in metrics]
        if metrics and one.zero_shot_difference is not None:
            scores[-1] += f", {points(one.zero_shot_difference)}"
        seeds = " ".join(map(_plain, one.each_seed))
        shown = _shown_difference(one)
        result.append([one.loss, _plain(one.scores["R@1"]), shown, *scores, seeds, one.setting, f"{one.lr:g}"])
        mib = [f"{value / 2**20:.1f}" for value in (one.memory_bytes, one.state_bytes)]
        cost.append([one.loss, f"{1000 * one.step_seconds:.1f}", *mib, f"{one.temperature:.3f}"])
        if one.normalizers is not None:
            batch = one.normalizers["batch"]
            median, low, high = _factor(batch)
            pair = [f"{one.normalizers.get(name, batch)['mean']:.3f}" for name in ("own_batch", "own")]
            temperature = f"{one.normalizers['temperature']:.3f}"
            errors.append([one.loss, temperature, f"{median} ({low} to {high})", *pair])
    runs = [["loss", "setting", "lr", "seeds", "MRR, choosing half", "R@1"]]
    for loss, setting, lr, count, choice, recall in report.runs:
        runs.append([loss, setting, f"{lr:g}", str(count), _plain(choice), _plain(recall)])
    found = {"Result": result, "Normalizers of the trained models": errors, "Cost": cost, "All runs": runs}
    return {title: rows for title, rows in found.items() if len(rows) > 1}


def _command(report: Report) -> str | None:
    return next((one.command for one in report.results if one.loss == report.recommended), None)


def markdown(report: Report) -> str:
    """Return the report as Markdown."""
    parts = ["# Which loss?", f"**{report.sentence}**", report.text_of_judgement]
    if command := _command(report):
        parts += ["Train the recommended configuration, at the pilot's length:", f"```bash\n{command}\n```"]
    for title, (head, *rows) in tables(report).items():
        parts += [f"## {title}", markdown_table(head, rows)]
    return "\n\n".join([*parts, "## Reading it", *lines(report)]) + "\n"


def page(report: Report) -> str:
    """Return the report as an HTML page: its words and tables, and learning curves as inline SVG."""
    curves = [
        line_chart(drawn, label, "R@1", from_zero=True, size=(520, 300))
        for drawn, label in zip(_curves(report), ("samples seen", "seconds of training"), strict=True)
        if drawn
    ]
    return render_page(
        "compare.html",
        "Which loss?",
        report=report,
        command=_command(report),
        curves=curves,
        legend=[(color(number), one.loss) for number, one in enumerate(report.results)],
        tables=tables(report),
        lines=lines(report),
    )


def _curves(report: Report) -> tuple[list[Curve], list[Curve]]:
    """Return each loss's R@1 in percent over samples and over seconds: means over the seeds that all losses have."""
    common = min((len(one.curves) for one in report.results), default=0)
    over_samples, over_time = [], []
    for number, one in enumerate(report.results):
        # Seeds have the same points in samples; their times are averaged.
        points = [
            tuple(map(statistics.fmean, zip(*seeds, strict=True))) for seeds in zip(*one.curves[:common], strict=False)
        ]
        over_samples.append(Curve(one.loss, [(samples, 100 * score) for samples, _, score in points], number))
        over_time.append(Curve(one.loss, [(seconds, 100 * score) for _, seconds, score in points], number))
    return over_samples, over_time
