"""README's table and figure agree with the published results, and README's code prints the output that README shows."""

import json
import re
from collections import defaultdict
from pathlib import Path
from statistics import fmean
from typing import Any

from openclip_ext.compare.trials import read_results
from scripts.experiments import gains
from scripts.experiments.tables import recall, with_interval

ROOT = Path(__file__).parents[2]


def published_rows() -> list[dict[str, Any]]:
    files = sorted((ROOT / "docs" / "benchmarks" / "icons").glob("*.jsonl"))
    return [row for file in files for row in read_results(file).values()]


def test_readme_has_the_gains_of_the_published_rows(tmp_path):
    rows = published_rows()
    table = gains.table(gains.gain(pairing, rows) for pairing in gains.BATCHES)
    readme = (ROOT / "README.md").read_text()
    assert all(row in readme for row in table.splitlines()[2:]), table
    page = (ROOT / "docs" / "experiments" / "batch-sizes.md").read_text()
    for one in (gains.gain(pairing, rows) for pairing in (*gains.BATCHES, *gains.OTHERS, gains.LARGER)):
        assert f"| {one.openclip:.1f} | {one.queueclip:.1f}, {with_interval(one.differences)} |" in page
    figure = tmp_path / "gains.png"
    gains.draw([gains.gain(pairing, rows) for pairing in (*gains.BATCHES, *gains.OTHERS)], figure)
    assert figure.read_bytes()[:4] == b"\x89PNG"


def test_readmes_curve_is_that_of_the_published_rows(tmp_path):
    rows = published_rows()
    found = {pairing.batch_size: gains.gain(pairing, rows) for pairing in gains.CURVE}
    tuned = [gains.gain(pairing, rows, pairing.best) for pairing in gains.CURVE]
    page = (ROOT / "docs" / "experiments" / "batch-sizes.md").read_text()
    for (batch, one), other in zip(found.items(), tuned, strict=True):
        shown = (f"{of.queueclip:.1f}, {with_interval(of.differences)}" for of in (one, other))
        assert f"| {batch} | {one.openclip:.1f} | {' | '.join(shown)} |" in page
    best = max(found.values(), key=lambda one: one.openclip)
    readme = " ".join((ROOT / "README.md").read_text().split())
    assert f"best at batch {best.label}, with R@1 {best.openclip:.1f}" in readme
    assert f"reaches {found[128].queueclip:.1f} at batch 128, and {found[256].queueclip:.1f} at 256" in readme
    gains.draw_curve([*found.values()], tuned, tmp_path / "curve.png")
    assert (tmp_path / "curve.png").read_bytes()[:4] == b"\x89PNG"


def test_the_page_of_examples_has_the_scores_of_other_libraries():
    """Each loss is compared with openclip on a processor of the same maker."""

    def run_of(row: dict[str, Any]) -> tuple[int, str]:
        return row["seed"], row["environment"]["cpu"].split()[0]

    tuned = {"loss": "openclip", "temperature": 0.03}
    base = {
        run_of(row): recall(row["test"])
        for row in published_rows()
        if row["setting"] == tuned and (row["batch_size"], row["epochs"], row["model"]) == (64, 30, "demo-resnet")
    }
    runs: dict[tuple[str, str], dict[tuple[int, str], float]] = defaultdict(dict)
    for row in read_results(ROOT / "docs" / "benchmarks" / "icons" / "icons-other-losses.jsonl").values():
        runs[row["family"], json.dumps(row["setting"])][run_of(row)] = recall(row["test"])
    page = (ROOT / "examples" / "README.md").read_text(encoding="utf-8")
    published = [of for of in runs.values() if len(of) > 1]  # the better of two settings
    assert len(published) == 9 and len(base) == 6
    for of in published:
        gain = with_interval([score - base[run] for run, score in of.items()])
        assert f"| {fmean(of.values()):.1f} | {gain} |" in page


def test_the_page_has_the_accuracies_on_class_folders():
    root = ROOT / "docs"
    lines = (root / "benchmarks" / "class-folders.jsonl").read_text().splitlines()
    found: dict[tuple, list[float]] = defaultdict(list)  # by seed
    for row in sorted(map(json.loads, lines), key=lambda row: row["seed"]):
        found[row["loss"], row["lr"], row["equal_captions"]].append(100 * row["test_accuracy"])
    page = (root / "equal-captions.md").read_text(encoding="utf-8").replace("**", "")
    for loss in ("openclip", "queueclip"):
        cells = []
        for lr in (1e-5, 1e-4, 1e-3):
            plain, masked = (found[loss, lr, choice] for choice in ("negative", "mask"))
            gains = [after - before for before, after in zip(plain, masked, strict=True)]
            cells += [f"{fmean(plain):.1f}", f"{fmean(masked):.1f}"]
            cells[-1] += f", {with_interval(gains)}" if len(gains) > 1 else ""
        assert f"| `{loss}` | {' | '.join(cells)} |" in page


def test_readmes_listing_prints_what_its_comment_says(capsys):
    listing = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL).group(1)
    exec(listing, {})
    assert capsys.readouterr().out.strip() == re.search(r"# (\{.*\})", listing).group(1)
