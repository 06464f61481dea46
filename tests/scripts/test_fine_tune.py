"""The experiment of fine-tuning: own data with disjoint concepts, the order of the runs, and scores at equal keeping."""

from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from openclip_ext.compare.trials import Results, read_results
from openclip_ext.evaluation.statistics import seeds_interval
from scripts.experiments import fine_tune
from scripts.experiments.fine_tune import columns, next_run, own_at
from tests.scripts.test_icons import read, write_collection

ABOUT = {"data": "d", "model": "m", "schedule": "s", "batch_size": 64, "epochs": 10}


def curves(own: list[float], kept: list[float]) -> dict[str, dict[str, list[float]]]:
    named = {"own": own, "kept": kept}
    return {name: {w: [x] for w, x in zip(("0", "0.5", "1"), of, strict=True)} for name, of in named.items()}


def test_concepts_of_the_own_data_are_in_one_split_and_variants_are_left_out(tmp_path: Path):
    variant = {"bell-light-skin-tone": {"body": '<path d="M0 0h7v7z"/>'}}
    package = write_collection(tmp_path / "package", {"first": {"icons": variant}, "second": {}})
    pairs = {"train": 6, "val": 2, "test": 2}
    fine_tune.make_own(package, tmp_path / "own", ("first", "second"), pairs)
    captions = {split: {sample["txt"] for sample in read(tmp_path / "own" / split)} for split in pairs}
    assert {split: len(found) for split, found in captions.items()} == {"train": 3, "val": 1, "test": 1}
    assert len(set.union(*captions.values())) == 5


def test_the_demo_set_as_own_data_has_different_images_in_each_split(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(fine_tune, "DEMO_PAIRS", {"train": 3, "val": 2, "test": 2})
    fine_tune.main(["--make", "demo", "--own", str(tmp_path / "own")])
    images = {split: {sample["png"] for sample in read(tmp_path / "own" / split)} for split in fine_tune.DEMO_PAIRS}
    assert {split: len(found) for split, found in images.items()} == fine_tune.DEMO_PAIRS
    assert len(set.union(*images.values())) == 7


@pytest.mark.parametrize(
    "kept, share, expected",
    [
        ([0.2, 0.18, 0.1], 0.95, 0.15),  # halfway between the first two mixes
        ([0.2, 0.18, 0.1], 0.75, 0.2375),  # 3/8 of the way from the second to the third mix
        ([0.2, 0.21, 0.2], 0.95, 0.3),  # never below
    ],
)
def test_the_own_score_where_the_kept_score_falls_to_a_share(kept: list[float], share: float, expected: float):
    assert own_at(curves([0.1, 0.2, 0.3], kept), share) == pytest.approx(expected)


def test_the_unconstrained_mix_is_chosen_on_validation_pairs():
    row = {"val": curves([0.1, 0.3, 0.2], [0.2] * 3), "test": curves([0.1, 0.15, 0.4], [0.2] * 3)}
    assert columns(row, "test")[-1] == pytest.approx(15)


def test_rates_are_chosen_with_the_first_seed_then_rehearsal_then_other_seeds():
    results: dict[str, dict] = {}
    order = []
    while (run := next_run(ABOUT, results)) is not None:
        results[run.id] = {"val": {"mean": run.lr if run.family == "openclip" else -run.lr}}
        order.append((run.family, run.setting["keep_share"], run.lr, run.seed))
    assert {seed for *_, seed in order[:10]} == {0} and {lr for _, _, lr, _ in order[:8]} == set(fine_tune.RATES)
    assert order[8:10] == [("openclip", 0.25, 3e-3, 0), ("queueclip", 0.25, 1e-4, 0)]
    assert {seed for *_, seed in order[10:18]} == {1, 2}
    assert len(order) == len(set(order)) == 10 * 6  # ten families at four rates, and the best with two more seeds


def test_a_change_of_the_recipe_runs_at_one_rate_with_all_seeds():
    recipe, results = fine_tune.COMPARISONS["recipe"], {}
    while (run := next_run(ABOUT, results, recipe)) is not None:
        results[run.id] = {"val": {"mean": 0.0}, "run": run}
    runs = [row["run"] for row in results.values()]
    assert len(runs) == 3 * len(fine_tune.CHANGES) and {(run.lr, run.family) for run in runs} == {(1e-3, "queueclip")}
    plain = next_run(ABOUT, {}, fine_tune.ALL)
    base = replace(plain, lr=1e-3, setting={"flags": "--loss queueclip", "keep_share": 0.25})
    assert base.id in results  # the rows of the other comparison are used
    assert {(run.epochs, run.batch_size) for run in runs} == {(10, 64), (5, 64), (20, 64), (10, 32), (10, 128)}


def test_parts_are_added_to_rehearsal_with_each_loss():
    methods = fine_tune.COMPARISONS["parts"]
    (contest,) = fine_tune.contests(ABOUT, {}, methods)
    assert list(contest.families)[:2] == ["openclip, rehearsal", "openclip, rehearsal, equal captions masked"]
    assert len(contest.families) == 2 * len(fine_tune.PARTS) and contest.seeds == fine_tune.SEEDS
    rehearsed = fine_tune.runs_of(fine_tune.FIRST, ABOUT, (1e-3,), 0.25)
    for name, (run,) in rehearsed.items():
        assert contest.families[name][0].id == run.id  # the rows of the other comparison are used


EXPERIMENTS = {
    "fine-tune": "methods",
    "fine-tune-small-temperature": "temperatures",
    "fine-tune-queueclip-start": "losses",
    "fine-tune-siglip": "siglip",
    "fine-tune-300k-start": "losses",
    "fine-tune-all-emoji": "equal-captions",
    "fine-tune-clip-arts": "losses",
    "fine-tune-demo": "losses",
}
ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "experiments" / "fine-tuning.md").read_text(encoding="utf-8").replace("`", "")


def published(name: str) -> tuple[dict[str, Any], Results]:
    """Return what the published rows have in common, and the rows."""
    rows = read_results(ROOT / "docs" / "benchmarks" / "icons" / f"{name}.jsonl")
    first = next(iter(rows.values()))
    return {name: first[name] for name in ("data", "model", "schedule", "batch_size", "epochs")}, rows


def test_the_page_begins_with_the_leads_of_all_experiments():
    table = PAGE.partition("## Eight experiments")[2].partition("|---")[2].splitlines()[1:]
    for line, (name, comparison) in zip(table, EXPERIMENTS.items(), strict=False):
        cells = fine_tune.lead(*published(name), fine_tune.COMPARISONS[comparison])
        assert line.endswith(f" | {' | '.join(cells)} |"), name
    assert not table[len(EXPERIMENTS)]


def test_queueclip_with_rehearsal_is_certainly_ahead_of_openclip_alone():
    """At 75 % kept, as the page says of all experiments, and it has the best mean of all methods."""
    for name, comparison in EXPERIMENTS.items():
        methods = fine_tune.COMPARISONS[comparison]
        found = {
            method: {seed: fine_tune.columns(row, "test")[1] for seed, row in rows.items()}
            for method, _, rows in fine_tune.best_rows(*published(name), methods)
        }
        ours = found["queueclip, rehearsal"]
        low, _ = seeds_interval([ours[seed] - found["openclip"][seed] for seed in ours])
        assert low > 0, name
        assert max(found, key=lambda method: fmean(found[method].values())) == "queueclip, rehearsal", name


@pytest.mark.parametrize(
    ("name", "comparison"), [*EXPERIMENTS.items(), ("fine-tune-recipe", "recipe"), ("fine-tune-300k-start", "parts")]
)
def test_the_page_has_the_table_of_the_published_rows(tmp_path: Path, name: str, comparison: str):
    methods = fine_tune.COMPARISONS[comparison]
    about, rows = published(name)
    for line in fine_tune.table(about, rows, methods).splitlines()[2:]:
        name, _, _, _, *scores = (cell.strip() for cell in line.strip("|").split("|"))
        assert f"| {name.replace('`', '')} | {' | '.join(scores)} |" in PAGE
    fine_tune.draw(about, rows, tmp_path / "figure.png", methods)
    assert (tmp_path / "figure.png").read_bytes()[:4] == b"\x89PNG"
