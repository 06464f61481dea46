"""Write the report of the finished runs, as Markdown and as a self-contained HTML page."""

import itertools
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from openclip_ext.compare.space import BASELINE, setting_words
from openclip_ext.compare.trial import RETRIEVAL, ZERO_SHOT, unpack
from openclip_ext.compare.trials import Results, Run, Trials, score
from openclip_ext.evaluation.ranks import chance
from openclip_ext.evaluation.statistics import Difference, format_bound, linked_groups, paired_difference
from openclip_ext.pages.charts import Chart, Curve, color, line_chart
from openclip_ext.pages.rendering import markdown_table, render_lines, render_page, with_minus

ABOUT_COMMAND = "To train the recommended configuration for the epochs in its row of the table Result:"
_METRIC_WORDS = {RETRIEVAL[0]: "image to text", RETRIEVAL[1]: "text to image", ZERO_SHOT: "zero-shot"}

Row = Mapping[str, Any]


@dataclass(frozen=True)
class About:
    """Data, model and settings of a comparison, for the report."""

    data: str
    model: str
    batch: int
    num_samples: int
    before: float  # R@1 before training
    notes: tuple[str, ...]
    processes: int


@dataclass(frozen=True)
class LossResult:
    """Results of a loss with its best setting.

    Attributes:
        scores: Mean over seeds, by metric. ``R@1`` is averaged over both directions.
        seeds: The seeds of the finished runs.
        each_seed: R@1 of each seed.
        gain: R@1 minus ``openclip``'s R@1 in runs of the same length, averaged over common seeds; None without common seeds.
        difference, zero_shot_difference: Gain in R@1 and in zero-shot accuracy, with intervals. None with fewer than two
            common seeds.
        gains: ``(epochs, gain, number of seeds)`` for each run length, the shortest first.
        curves: ``(samples, seconds, R@1)`` for each seed.
        command: The command line that trains with this setting.
    """

    loss: str
    setting: str
    lr: float
    epochs: float
    scores: Mapping[str, float]
    seeds: tuple[int, ...]
    each_seed: tuple[float, ...]
    gain: float | None
    difference: Difference | None
    zero_shot_difference: Difference | None
    gains: Sequence[tuple[float, float, int]]
    temperature: float
    step_seconds: float
    memory_bytes: int
    state_bytes: int
    curves: Sequence[Sequence[tuple[float, float, float]]]
    command: str


@dataclass(frozen=True)
class Report:
    """Content of the report.

    Attributes:
        recommended: The loss to use. None means that there is no result.
        results: Results of the losses, the best first.
        runs: Each setting's means over seeds: ``(loss, setting, lr, epochs, seeds, mean reciprocal rank, R@1)``.
        left_behind: Losses that did not reach the last rung.
        chance: R@1 of random guessing, averaged over both directions.
        rate_advice: What to do if the recommended learning rate is the largest or the smallest that was tried, else empty.
    """

    about: About
    sentence: str
    recommended: str | None
    results: tuple[LossResult, ...]
    runs: tuple[tuple[str, str, float, float, int, float, float], ...]
    unfinished: int
    failures: tuple[str, ...]
    left_behind: tuple[str, ...]
    chance: float
    rate_advice: str


def make_report(
    about: About,
    trials: Trials,
    losses: Sequence[str],
    images: Sequence[int],
    captions: Sequence[str],
    command_line: Callable[[Row], str],
) -> Report:
    """Build the report on a comparison of ``losses`` from their trials.

    Args:
        images, captions: Of the test samples, a hash of the image and the caption.
        command_line: Function that returns the training command line of a run.
    """
    groups = linked_groups(images, captions)
    rungs = range(len(trials.rungs))
    by_rung = [{loss: _finished(trials.best(rung, loss), trials.done) for loss in losses} for rung in rungs]
    found, chosen = [], {}
    for loss in losses:
        own = [(rows[loss], rows[BASELINE]) for rows in by_rung if rows[loss]]
        if own:
            # An interval needs two common seeds. Choose the last rung with two, or else the last rung with one.
            chosen[loss] = max(reversed(own), key=lambda rows: min(2, len(rows[0].keys() & rows[1].keys())))
            gains = {gain[0]: gain for rows in own if loss != BASELINE and (gain := _gain_at(*rows, about))}
            found.append(_loss_result(*chosen[loss], about, groups, tuple(gains.values()), command_line))
    found.sort(key=lambda result: (-result.epochs, -_gain(result)))
    longest = _longest(found)
    best = chosen[_leader(longest).loss][0] if longest else {}
    to_best = {result.loss: _difference(best, chosen[result.loss][0], groups) for result in longest}
    planned = {run.id for runs in trials.planned for run in runs.values() if run.family in losses}
    failures = [row["failed"].strip() for row in trials.failed.values()]
    sentence, recommended = conclude(found, about.batch, to_best, len(failures))
    if any(result.loss == recommended and result.scores["R@1"] <= about.before for result in found):
        sentence += (
            f" But training did not help: R@1 was {_plain(about.before)} before. Train longer, or with other rates."
        )
    runs = {}
    for rung, loss in itertools.product(rungs, losses):
        for setting in trials.settings(rung, loss):
            if rows := list(_finished(setting, trials.done).values()):
                runs[setting[0].id] = _setting_row(rows, about)
    in_last = {run.family for run in trials.planned[-1].values()}
    return Report(
        about=about,
        sentence=sentence,
        recommended=recommended,
        results=tuple(found),
        runs=tuple(runs.values()),
        unfinished=len(planned - trials.done.keys()),
        failures=tuple(sorted({f"a run failed: {failure}" for failure in failures})),
        left_behind=tuple(loss for loss in losses if loss not in in_last),
        chance=statistics.fmean(chance(images, captions).values()),
        rate_advice="".join(_rate_advice(result, runs.values()) for result in found if result.loss == recommended),
    )


def _rate_advice(chosen: LossResult, runs: Iterable[tuple[str, str, float, float, int, float, float]]) -> str:
    rates = {lr for loss, setting, lr, *_ in runs if (loss, setting) == (chosen.loss, chosen.setting)}
    if len(rates) == 1 or min(rates) < chosen.lr < max(rates):
        return ""
    which, better = ("smallest", chosen.lr / 2) if chosen.lr == min(rates) else ("largest", chosen.lr * 2)
    return (
        f"The best learning rate of {chosen.loss}, {chosen.lr:g}, is the {which} one tried. To try others, compare with "
        f"--lr {better:g} and another --output."
    )


def _finished(runs: Sequence[Run], results: Results) -> dict[int, Row]:
    """Return the rows of finished runs by seed."""
    return {run.seed: results[run.id] for run in runs if run.id in results}


def _epochs(row: Row, about: About) -> float:
    return row["epochs"] * (row["epoch_samples"] or about.num_samples) / about.num_samples


def _gain_at(rows: Mapping[int, Row], baseline: Mapping[int, Row], about: About) -> tuple[float, float, int] | None:
    """Return epochs, mean gain over the baseline, and number of common seeds; None without a common seed."""
    gains = [_recall(rows[seed]) - _recall(baseline[seed]) for seed in rows if seed in baseline]
    return (_epochs(next(iter(rows.values())), about), statistics.fmean(gains), len(gains)) if gains else None


def _setting_row(rows: Sequence[Row], about: About) -> tuple[str, str, float, float, int, float, float]:
    first = rows[0]
    words = setting_words(first["family"], first["setting"]["options"])
    means = [statistics.fmean(map(function, rows)) for function in (score, _recall)]
    return first["family"], words, first["lr"], _epochs(first, about), len(rows), means[0], means[1]


def _loss_result(
    rows: Mapping[int, Row],
    baseline: Mapping[int, Row],
    about: About,
    groups: Sequence[int],
    gains: Sequence[tuple[float, float, int]],
    command_line: Callable[[Row], str],
) -> LossResult:
    every = list(rows.values())
    loss, setting, lr, epochs, *_ = _setting_row(every, about)
    scores = {name: float(torch.stack([_hits(row, [name]) for row in every]).mean()) for name in every[0]["hits"]}
    each_seed = tuple(_recall(row) for row in every)
    gain = _gain_at(rows, baseline, about)
    paired = {} if loss == BASELINE else rows
    return LossResult(
        loss=loss,
        setting=setting,
        lr=lr,
        epochs=epochs,
        scores={"R@1": statistics.fmean(each_seed)} | scores,
        seeds=tuple(rows),
        each_seed=each_seed,
        gain=gain and gain[1],
        difference=_difference(paired, baseline, groups),
        zero_shot_difference=_difference(paired, baseline, groups, (ZERO_SHOT,)) if ZERO_SHOT in scores else None,
        gains=gains,
        temperature=statistics.fmean(row["temperature"] for row in every),
        # The median over seeds, because another program on the machine may have slowed one of the runs.
        step_seconds=statistics.median(row["seconds"] / row["steps"] for row in every),
        memory_bytes=max(row["memory_bytes"] for row in every),
        state_bytes=every[0]["state_bytes"],
        curves=[row["curve"] for row in every],
        command=command_line(every[0]),
    )


def _hits(row: Row, metrics: Sequence[str]) -> Tensor:
    """Return each sample's hit (1) or miss (0), averaged over the metrics: ``(N,)``."""
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


def _longest(found: Sequence[LossResult]) -> list[LossResult]:
    """Return the results with an interval and the longest runs, because gains of shorter runs are not comparable."""
    certain = [result for result in found if result.difference is not None]
    return [result for result in certain if result.epochs == max(one.epochs for one in certain)]


def _leader(found: Sequence[LossResult]) -> LossResult:
    """Return the best loss among those whose gain has an interval above 0, or among all if there is none."""
    sure = [result for result in found if result.difference is not None and result.difference.low > 0]
    return max(sure or found, key=_gain)


def _gain(result: LossResult) -> float:
    return -math.inf if result.gain is None else result.gain


def conclude(
    found: Sequence[LossResult],
    batch: int,
    to_best: Mapping[str, Difference | None],
    failed: int = 0,
) -> tuple[str, str | None]:
    """Return a sentence about the result, and the recommended loss.

    ``to_best`` contains the best loss's gain over each loss in runs of equal length. ``failed`` is the number of failed runs.
    """
    others = _longest(found)
    if not others:
        if not failed:
            return "No result yet: there are fewer than two paired runs. Run the same command again to continue.", None
        return f"No result: {failed} runs failed, for the reasons below. The same command executes them again.", None
    best = _leader(others)
    assert best.difference is not None
    difference = f"{points(best.difference)} R@1"
    if best.difference.low > 0:
        sentence = f"{best.loss}, {difference} over {BASELINE} at batch {batch}"
        gaps = {loss: gap for loss, gap in to_best.items() if gap is not None and loss not in (best.loss, BASELINE)}
        equal = [loss for loss, gap in gaps.items() if gap.low <= 0 <= gap.high]
        sentence += f"; no difference between {best.loss} and {', '.join(equal)}" if equal else ""
        return f"{sentence}.", best.loss
    sentence = f"Nothing beats {BASELINE} with confidence at batch {batch}: {best.loss} is nearest, {difference}"
    worse = [result.loss for result in others if result.difference and result.difference.high < 0]
    sentence += f"; worse: {', '.join(worse)}" if worse else ""
    return f"{sentence}. Use {BASELINE} with its best setting.", BASELINE


def points(difference: Difference) -> str:
    """Format a difference and its interval in percentage points, such as ``+4.1 (3.2 to 5.0)``."""
    low, high = (with_minus(format_bound(100 * bound)) for bound in (difference.low, difference.high))
    return f"{_signed(difference.mean)} ({low} to {high})"


def _plain(value: float, form: str = ".1f") -> str:
    return with_minus(f"{100 * value:{form}}")


def _signed(value: float) -> str:
    return _plain(value, "+.1f")


def lines(report: Report) -> list[str]:
    """Return paragraphs that explain the results."""
    return render_lines("compare.txt", report=report)


def _shown_difference(result: LossResult) -> str:
    if result.difference is not None:
        return points(result.difference)
    return "" if result.loss == BASELINE or result.gain is None else f"{_signed(result.gain)}, one seed"


def tables(report: Report) -> dict[str, list[list[str]]]:
    """Return the tables by title. The first row of a table is its header."""
    metrics = [name for name in _METRIC_WORDS if report.results and name in report.results[0].scores]
    words = [_METRIC_WORDS[name] for name in metrics]
    result = [["loss", f"minus {BASELINE}", "R@1", "epochs", *words, "setting", "lr", "each seed"]]
    cost = [["loss", "ms a step", "memory, MiB", "state of the loss, MiB", "τ at the end"]]
    gains = [["loss", "epochs", f"minus {BASELINE}, R@1", "seeds"]]
    for one in report.results:
        scores = [_plain(one.scores[name]) for name in metrics]
        if metrics and one.zero_shot_difference is not None:
            scores[-1] += f", {points(one.zero_shot_difference)}"
        # The interval is in one of the first columns, which are visible on a small screen.
        head = [one.loss, _shown_difference(one), _plain(one.scores["R@1"]), f"{one.epochs:.1f}"]
        result.append([*head, *scores, one.setting, f"{one.lr:g}", " ".join(map(_plain, one.each_seed))])
        mib = [f"{value / 2**20:.1f}" for value in (one.memory_bytes, one.state_bytes)]
        cost.append([one.loss, f"{1000 * one.step_seconds:.1f}", *mib, f"{one.temperature:.3f}"])
        gains += [[one.loss, f"{epochs:.1f}", _signed(gain), str(seeds)] for epochs, gain, seeds in one.gains]
    result.append(["before training", "", _plain(report.about.before), "0.0", *[""] * (len(metrics) + 3)])
    runs = [["loss", "setting", "lr", "epochs", "seeds", "MRR, choosing half", "R@1"]]
    for loss, setting, lr, epochs, count, choice, recall in report.runs:
        runs.append([loss, setting, f"{lr:g}", f"{epochs:.1f}", str(count), _plain(choice), _plain(recall)])
    found = {
        "Result": result,
        "Gain by length": gains,
        "Cost": cost,
        "All runs": runs,
    }
    return {title: rows for title, rows in found.items() if len(rows) > 1}


def recommended_command(report: Report) -> str | None:
    """Return the training command of the recommended loss, if there is one."""
    return next((one.command for one in report.results if one.loss == report.recommended), None)


def markdown(report: Report) -> str:
    parts = ["# Which loss?", f"**{report.sentence}**"]
    if command := recommended_command(report):
        parts += [
            ABOUT_COMMAND,
            f"```bash\n{command}\n```",
        ]
    for title, rows in tables(report).items():
        parts += [f"## {title}", markdown_table(rows)]
    return "\n\n".join([*parts, "## Reading it", *lines(report)]) + "\n"


def page(report: Report) -> str:
    """Return the report as an HTML page with learning curves as inline SVG."""
    # Losses that did not reach the last rung are not drawn, because their runs are shorter.
    drawn = [one for one in report.results if one.epochs == report.results[0].epochs]
    curves = [
        line_chart(Chart("R@1", _curves(drawn, column), label, from_zero=True), size=(520, 300))
        for column, label in enumerate(("samples seen", "seconds of training"))
        if drawn
    ]
    return render_page(
        "compare.html",
        "Which loss?",
        report=report,
        command=recommended_command(report),
        curves=curves,
        legend=[(color(number), one.loss) for number, one in enumerate(drawn)],
        tables=tables(report),
        lines=lines(report),
    )


def _curves(results: Sequence[LossResult], column: int) -> list[Curve]:
    """Return curves of R@1 in percent over samples (``column`` 0) or seconds (1), averaged over common seeds."""
    common = set[int].intersection(*(set(one.seeds) for one in results))
    found = []
    for number, one in enumerate(results):
        curves = [curve for seed, curve in zip(one.seeds, one.curves, strict=True) if seed in common]
        points = [tuple(map(statistics.fmean, zip(*at, strict=True))) for at in zip(*curves, strict=False)]
        found.append(Curve(one.loss, [(point[column], 100 * point[2]) for point in points], number))
    return found
