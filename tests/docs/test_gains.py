"""README's table and figure agree with the published results, and README's code prints the output that README shows."""

import json
import re
from pathlib import Path
from statistics import fmean

from openclip_ext.compare.trials import read_results
from scripts.experiments import gains
from scripts.experiments.tables import with_interval

ROOT = Path(__file__).parents[2]


def test_readme_has_the_gains_of_the_published_rows(tmp_path):
    files = (ROOT / "docs" / "benchmarks" / "icons").glob("*.jsonl")
    rows = [row for file in files for row in read_results(file).values()]
    table = gains.table(gains.gain(pairing, rows) for pairing in gains.BATCHES)
    readme = (ROOT / "README.md").read_text()
    assert all(row in readme for row in table.splitlines()[2:]), table
    figure = tmp_path / "gains.png"
    gains.draw([gains.gain(pairing, rows) for pairing in (*gains.BATCHES, *gains.OTHERS)], figure)
    assert figure.read_bytes()[:4] == b"\x89PNG"


def test_readmes_curve_is_that_of_the_published_rows(tmp_path):
    files = (ROOT / "docs" / "benchmarks" / "icons").glob("*.jsonl")
    rows = [row for file in files for row in read_results(file).values()]
    found = {pairing.batch_size: gains.gain(pairing, rows) for pairing in gains.CURVE}
    page = (ROOT / "docs" / "experiments" / "batch-sizes.md").read_text()
    for batch, one in found.items():
        assert f"| {batch} | {one.tuned:.1f} | {one.untuned:.1f}, {with_interval(one.differences)} |" in page
    best = max(found.values(), key=lambda one: one.tuned)
    readme = " ".join((ROOT / "README.md").read_text().split())
    assert f"best at batch {best.label}, with R@1 {best.tuned:.1f}" in readme
    assert f"reaches {found[128].untuned:.1f} at batch 128, and {found[256].untuned:.1f} at 256" in readme
    gains.draw_curve([*found.values()], tmp_path / "curve.png")
    assert (tmp_path / "curve.png").read_bytes()[:4] == b"\x89PNG"


def test_the_page_has_the_accuracies_on_class_folders():
    root = ROOT / "docs"
    lines = (root / "benchmarks" / "class-folders.jsonl").read_text().splitlines()
    found = {
        (row["loss"], row["equal_captions"], row["seed"]): 100 * row["test_accuracy"] for row in map(json.loads, lines)
    }
    page = (root / "equal-captions.md").read_text(encoding="utf-8").replace("**", "")
    for loss in ("openclip", "queueclip"):
        plain, masked = ([found[loss, choice, seed] for seed in range(3)] for choice in ("negative", "mask"))
        gain = with_interval([after - before for before, after in zip(plain, masked, strict=True)])
        assert f"| `{loss}` | {fmean(plain):.1f} | {fmean(masked):.1f} | {gain} |" in page
    over = [found["queueclip", "mask", seed] - found["openclip", "mask", seed] for seed in range(3)]
    assert f"{fmean(over):.1f} points ({with_interval(over).partition('(')[2]} above" in page


def test_readmes_listing_prints_what_its_comment_says(capsys):
    listing = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL).group(1)
    exec(listing, {})
    assert capsys.readouterr().out.strip() == re.search(r"# (\{.*\})", listing).group(1)
