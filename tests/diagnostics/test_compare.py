"""``compare``: equal tuning, plans that fit the time, honest intervals, the sentence, and whole comparisons on a tiny set."""

import io
import json
import shlex
import statistics
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import open_clip
import pytest
import torch
from PIL import Image
from scipy import stats

from openclip_ext.data.manifest import Manifest
from openclip_ext.diagnostics.compare import command, comparison, space
from openclip_ext.diagnostics.compare import design as designs
from openclip_ext.diagnostics.compare import pilot as pilots
from openclip_ext.diagnostics.compare.comparison import Comparison
from openclip_ext.diagnostics.compare.config import parse
from openclip_ext.diagnostics.compare.design import (
    MOST_SEEDS,
    Costs,
    Design,
    Run,
    Rung,
    Schedule,
    add_seed,
    plan,
    plan_finals,
    setting_words,
)
from openclip_ext.diagnostics.compare.pilot import (
    RETRIEVAL,
    Length,
    recall,
    run_pilot,
    unpacked,
    warmup_steps,
)
from openclip_ext.diagnostics.compare.prepare import prepare
from openclip_ext.diagnostics.compare.report import About, LossResult, conclude, judgement
from openclip_ext.diagnostics.compare.samples import PilotData, Texts, Tokens, divide, remove_others
from openclip_ext.diagnostics.compare.space import BASELINE, DEFAULT_LOSSES, Configuration, Setting, configurations
from openclip_ext.diagnostics.compare.statistics import Difference, paired_difference, student_t
from openclip_ext.diagnostics.compare.workers import Deadline, ResultsFile, Workers
from openclip_ext.losses import registry
from openclip_ext.model_configs import add_model_configs
from openclip_ext.retrieval import ranks_of_best_match
from openclip_ext.training import flags
from tests.data.shards import write_tar

COSTS = Costs(per_sample={BASELINE: 1e-3, "neuclip": 2e-3}, per_run=1.0, per_final=2.0)
LOSSES = (BASELINE, "neuclip")


# --- what is tried ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("loss", DEFAULT_LOSSES)
def test_every_configuration_can_be_built(loss):
    for one in configurations(loss, {}):
        registry.create_loss(loss, embed_dim=8, num_samples=100, **one.setting.options)


def test_short_runs_get_what_they_need_unless_the_user_says():
    remembers, published = space.settings_of("fastclip", {})[0], space.settings_of("fastclip", {})[5]
    assert (remembers.options["gamma"], remembers.options["gamma_schedule"]) == (0.8, "constant")
    assert setting_words(remembers) == "τ solved, ρ 4, γ 0.8"
    assert published == Setting({})
    assert space.settings_of("amorlip", {})[0].options["reinitialize"] is False
    assert "gamma" not in space.settings_of("fastclip", {"gamma": 0.5})[0].options
    assert space.settings_of("queueclip", {})[0] == Setting({"temperature_scheme": "solved", "rho": 4.0})


def test_configurations_differ_and_take_settings_before_rates():
    for loss in DEFAULT_LOSSES:
        found = configurations(loss, {})
        assert len({json.dumps([vars(one.setting), one.lr_factor]) for one in found}) == len(found)
        settings = space.settings_of(loss, {})
        assert [one.setting for one in found[:4]] == settings[:4]
        assert {one.lr_factor for one in found[:4]} == {1.0}
        assert {one.lr_factor for one in found[4:6]} == {0.5, 2.0}
    assert space.most_configurations(DEFAULT_LOSSES, {}) >= 9


# --- the plan --------------------------------------------------------------------------------------------------------


def work(design: Design, costs: Costs) -> float:
    """Seconds of all runs together."""
    runs = design.search_runs + design.final_runs
    fixed = runs * costs.per_run + design.final_runs * costs.per_final
    return fixed + design.samples() / len(design.losses) * sum(costs.per_sample.values())


@pytest.mark.parametrize("minutes", [1.5, 5, 30, 300])
@pytest.mark.parametrize("processes", [1, 2, 8])
def test_the_plan_fits_the_time_and_uses_it(minutes, processes):
    design = plan(LOSSES, COSTS, 60 * minutes, processes, batch=16, most_samples=10**9, most_tried=18)
    available = 60 * minutes * processes
    assert 0.9 * available < work(design, COSTS) <= available
    assert all(rung.samples % 16 == 0 and rung.samples >= 20 * 16 for rung in design.rungs)


def test_more_time_tries_more():
    found = [plan(LOSSES, COSTS, seconds, 2, 64, 10**9, 18) for seconds in (100, 400, 600, 3000, 10_000)]
    tried = [design.search_runs // len(LOSSES) + design.tried for design in found]
    assert tried == sorted(tried)
    assert (tried[0], tried[-1]) == (2, 9 + 4 + 2)
    assert {design.finalists for design in found} == {2}


def test_a_search_by_short_runs_needs_long_ones():
    for seconds in range(100, 10_000, 100):
        design = plan(LOSSES, COSTS, seconds, 2, 64, 10**9, 18)
        assert not design.rungs or design.shortest >= 1500 * 64


def test_with_time_to_spare_all_candidates_run_whole():
    design = plan(LOSSES, COSTS, 10**6, 2, 16, most_samples=3200, most_tried=18)
    assert (design.rungs, design.tried, design.final_samples) == ((), 9, 3200)


def test_a_loss_of_one_configuration_has_one_finalist():
    design = plan(LOSSES, COSTS, 3000, 2, 64, 10**9, most_tried=1)
    assert (design.tried, design.finalists, design.final_runs) == (1, 1, 3 * len(LOSSES))


def test_only_the_best_losses_run_all_seeds():
    losses = (BASELINE, "a", "b", "c", "d")
    costs = Costs(dict(zip(losses, (1e-3, 1e-3, 5e-3, 4e-3, 2e-3), strict=True)), per_run=1.0, per_final=2.0)
    design = plan(losses, costs, 3600, 2, 64, 10**9, most_tried=18)
    assert (design.tried, design.continued, design.runs_a_seed) == (2, 3, 6)
    assert design.final_runs == 5 * 2 + 2 * 6
    dearest = 22 * 3.0 + design.final_samples * (2 * 13e-3 + 2 * 2 * (1e-3 + 5e-3 + 4e-3))
    assert 0.99 * 7200 < dearest <= 7200


def test_runs_are_not_longer_than_asked():
    assert plan(LOSSES, COSTS, 10**6, 2, 16, most_samples=3200, most_tried=18).final_samples == 3200


def test_too_short_a_time_is_refused():
    with pytest.raises(ValueError, match=r"too short: 0\.1 minutes, .* more --minutes, fewer --losses"):
        plan(LOSSES, COSTS, 6, 2, 16, 10**9, 18)


def test_the_final_runs_take_the_rest_of_the_time():
    design = plan(LOSSES, COSTS, 3000, 2, 16, 10**9, 18)
    assert design.rungs
    slower = replace(COSTS, per_sample={name: 2 * pace for name, pace in COSTS.per_sample.items()})
    finals = plan_finals(design, slower, 2000, 2, 16, 10**9)
    seconds = 12 * (COSTS.per_run + COSTS.per_final) + 6 * finals.final_samples * sum(slower.per_sample.values())
    assert 0.95 * 4000 < seconds <= 4000
    assert plan_finals(design, slower, 1, 2, 16, 10**9).final_samples == design.rungs[-1].samples
    assert Design.of_json(json.loads(json.dumps(finals, default=vars))) == finals


def test_another_seed_if_the_time_allows():
    design = Design(LOSSES, (), tried=4, finalists=2, final_samples=320)
    runs = 2 * len(LOSSES)
    seconds = dict.fromkeys(LOSSES, 10.0)
    assert add_seed(design, seconds, 10 * runs / 2 - 1, processes=2) is None
    more = add_seed(design, seconds, 10 * runs / 2, processes=2)
    assert more is not None
    assert (more.seeds, more.final_runs) == ((0, 1, 2, 3), design.final_runs + runs)
    assert add_seed(replace(design, seeds=tuple(range(MOST_SEEDS))), seconds, 1e6, processes=2) is None


def test_a_run_is_cut_into_equal_epochs():
    assert Length.of(1000, 10, 400) == Length(3, 330)
    assert Length.of(400, 10, 400) == Length(1, 400)
    assert Length.of(100, 10, 405) == Length(1, 100)
    assert Length.of(1000, 10, 400).steps(10) == 99
    # 25 epochs of 3 steps; 26 would have 2 steps each.
    assert Length.of(19_660, 256, 1000) == Length(25, 768)
    # Whole epochs of whole batches are made as they were asked.
    assert Length.of(32 * 768, 256, 1000) == Length(32, 768)


def test_the_warmup_is_at_most_a_tenth():
    assert warmup_steps(10_000, 200) == 20
    assert warmup_steps(5, 200) == 5


# --- which runs come next --------------------------------------------------------------------------------------------


def schedule(rungs: Sequence[Rung] = (Rung(4, 100), Rung(2, 300)), tried: int = 2) -> Schedule:
    candidates = {loss: configurations(loss, {}) for loss in LOSSES}
    return Schedule(Design(LOSSES, tuple(rungs), tried, 2, 900), candidates, "context", 1e-3)


def finish(runs: Sequence[Run], score: Any = lambda run: 0.1) -> dict[str, dict[str, Any]]:
    return {run.id: {"id": run.id, "choice": score(run)} for run in runs}


def test_the_search_is_equal_for_all_losses():
    plans, results = schedule(), {}
    first = plans.search(results)
    assert [run.loss for run in first] == ["openclip", "neuclip"] * 4
    results |= finish(first[:-1])
    assert plans.search(results) == [first[-1], *[run for run in plans.search(results) if run.samples == 300]]
    favourite = first[2].configuration
    results |= finish(first, lambda run: 0.5 if run.configuration == favourite else 0.1)
    second = plans.search(results)
    assert [(run.loss, run.samples) for run in second] == [("openclip", 300), ("neuclip", 300)] * 2
    assert second[0].configuration == favourite
    assert plans.finals(results) == []
    results |= finish(second)
    finals = plans.finals(results)
    assert [(run.loss, run.seed) for run in finals] == [(loss, 0) for loss in ("openclip", "neuclip")] * 2
    assert {run.samples for run in finals} == {900}
    assert finals[0].configuration == favourite
    results |= finish(finals)
    finals = plans.finals(results)
    assert [(run.loss, run.seed) for run in finals] == [
        (loss, seed) for seed in (0, 1, 2) for loss in ("openclip", "neuclip") * 2
    ]


def test_the_first_seed_chooses_the_finalists_and_all_seeds_the_best():
    plans = schedule(rungs=(), tried=3)
    assert plans.search({}) == []
    tried = [runs[0] for runs in plans.finals_of("neuclip", {})]
    assert [run.configuration for run in tried] == configurations("neuclip", {})[:3]
    assert len(plans.finals({})) == 6
    assert plans.best("neuclip", {}) == []

    score = {tried[0].id: 0.1, tried[1].id: 0.4, tried[2].id: 0.3}
    results = finish(tried, lambda run: score[run.id])
    first, second, third = plans.finals_of("neuclip", results)
    assert [first[0], second[0], third] == [tried[1], tried[2], [tried[0]]]
    assert [run.seed for run in first] == [run.seed for run in second] == [0, 1, 2]
    assert plans.best("neuclip", results) == first

    results |= finish(second[1:], lambda run: 0.5)
    assert plans.best("neuclip", results) == first  # the other finalist has not run these seeds yet
    results |= finish(first[1:2], lambda run: 0.1)
    assert plans.best("neuclip", results) == second


def test_the_first_seed_leaves_losses_behind():
    losses = (BASELINE, "neuclip", "queueclip", "fastclip")
    candidates = {loss: configurations(loss, {}) for loss in losses}
    plans = Schedule(Design(losses, (), 2, 2, 900), candidates, "context", 1e-3)
    score = {BASELINE: 0.1, "neuclip": 0.4, "queueclip": 0.2, "fastclip": 0.3}
    tried = plans.finals({})
    assert len(tried) == 8
    results = finish(tried[:-1], lambda run: score[run.loss])
    assert plans.left_behind(results) is None
    assert {run.loss for run in plans.finals(results) if run.seed} == {BASELINE}
    results |= finish(tried[-1:], lambda run: score[run.loss])
    assert plans.left_behind(results) == ("queueclip",)
    assert {run.loss for run in plans.finals(results) if run.seed} == {BASELINE, "neuclip", "fastclip"}
    assert len(plans.finals(results)) == plans.design.final_runs == 8 + 2 * 2 * 3
    assert [run.seed for run in plans.best("queueclip", results)] == [0]


def test_settings_in_words():
    words = [setting_words(one) for one in space.settings_of(BASELINE, {})]
    assert words[:4] == ["τ learned", "τ learned, from 0.03", "τ constant, 0.1", "τ constant, 0.05"]
    assert setting_words(Setting({"rho": 5.0, "rho_end": None})) == "τ learned, ρ 5"
    assert setting_words(Setting(), space.own_scheme("sogclr")) == "τ constant"


@pytest.mark.parametrize(
    ("loss", "scheme"), [("sogclr", "constant"), ("isogclr", "per-sample"), ("tempnet", "predicted")]
)
def test_losses_known_for_their_temperature_keep_its_scheme(loss, scheme):
    for setting in space.settings_of(loss, {}):
        assert setting.options.get("temperature_scheme", space.own_scheme(loss)) == scheme
    assert space.settings_of(loss, {})[0].options["gamma"] == 0.8


def test_a_run_is_named_by_what_it_follows_from():
    run = schedule().search({})[0]
    changed = [replace(run, seed=1), replace(run, lr=1.0), replace(run, context="other"), replace(run, samples=1)]
    changed.append(replace(run, configuration=Configuration("openclip", Setting({"rho": 1.0}), 1.0)))
    assert len({one.id for one in [run, *changed]}) == 6
    assert run.id == schedule().search({})[0].id


def test_results_survive_a_cut_line_and_refuse_another_writer(tmp_path):
    path = tmp_path / "runs.jsonl"
    path.write_text('{"id": "a"}\n{"id": "b", "x')
    first = ResultsFile(path)
    assert list(first.lines) == ["a"]
    first.add({"id": "c"})
    with pytest.raises(ValueError, match="another process is writing"):
        ResultsFile(path)
    first.close()
    assert path.read_text() == '{"id": "a"}\n{"id": "c"}\n'
    path.write_text('{"id": "a"}\nrubbish\n')
    with pytest.raises(ValueError, match="line 2: not the result of a run"):
        ResultsFile(path)


# --- statistics ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("freedom", range(1, 12))
def test_students_t_is_scipys(freedom):
    assert student_t(freedom) == pytest.approx(stats.t.ppf(0.975, freedom), rel=1e-9)


def test_the_seeds_interval_is_scipys():
    random = np.random.default_rng(0)
    first, second = random.random((2, 4, 50))
    found = paired_difference(torch.tensor(first), torch.tensor(second), range(50))
    expected = stats.ttest_rel(first.mean(1), second.mean(1)).confidence_interval()
    assert (found.seeds_low, found.seeds_high) == pytest.approx((expected.low, expected.high))
    assert found.mean == pytest.approx((first - second).mean())


def test_the_interval_covers_seeds_and_samples():
    random = np.random.default_rng(1)
    covered = 0
    for _ in range(400):
        of_seed, of_sample = random.normal(0, 0.02, (3, 1)), random.normal(0, 0.3, (1, 200))
        difference = 0.05 + of_seed + of_sample + random.normal(0, 0.3, (3, 200))
        found = paired_difference(torch.tensor(difference), torch.zeros(3, 200), range(200))
        covered += found.low <= 0.05 <= found.high
    assert covered >= 0.94 * 400


def test_samples_of_one_caption_count_as_one():
    values = torch.randn(2, 40, dtype=torch.float64)
    alone = paired_difference(values, torch.zeros_like(values), range(40))
    twice = paired_difference(values.repeat(1, 2), torch.zeros(2, 80), [*range(40), *range(40)])
    assert (twice.low, twice.high) == pytest.approx((alone.low, alone.high))


def test_the_interval_covers_few_captions():
    random = np.random.default_rng(2)
    groups = np.arange(200) % 4
    covered = 0
    for _ in range(400):
        difference = 0.05 + random.normal(0, 0.3, 4)[groups] + random.normal(0, 0.1, (3, 200))
        found = paired_difference(torch.tensor(difference), torch.zeros(3, 200), groups.tolist())
        covered += found.low <= 0.05 <= found.high
    assert covered >= 0.93 * 400
    assert paired_difference(torch.ones(3, 4), torch.zeros(3, 4), [0] * 4) is None


def test_one_seed_has_no_interval():
    assert paired_difference(torch.ones(1, 4), torch.zeros(1, 4), range(4)) is None


# --- the sentence ----------------------------------------------------------------------------------------------------


def result(loss: str, score: float, half: float | None = None, gain: float | None = None) -> LossResult:
    gain = score - 0.3 if gain is None else gain
    difference = None if half is None else Difference(gain, gain - half, gain + half, gain, gain, 3)
    return LossResult(
        loss, "τ learned", 1e-3, {"R@1": score}, (score,), gain, difference, None, 0.05, 0.1, 1, 1, (), None, "train"
    )


def about(batch: int, groups: Sequence[int] = (0,)) -> About:
    return About("", "", batch, len(groups), (), True, 1, 30.0, 32, groups)


def gap(mean: float, half: float) -> Difference:
    return Difference(mean, mean - half, mean + half, mean, mean, 3)


def test_the_sentence_names_the_best_and_its_equals():
    found = [result("queueclip", 0.341, 0.009), result("neuclip", 0.339, 0.009), result("openclip", 0.3)]
    sentence, recommended = conclude(
        found, about(128), 8.0, {"neuclip": gap(0.002, 0.01), "openclip": gap(0.041, 0.009)}
    )
    assert sentence == (
        "queueclip, +4.1 (3.2 to 5.0) R@1 over openclip at batch 128; no difference between queueclip and neuclip."
    )
    assert recommended == "queueclip"


def test_the_sentence_says_when_nothing_beats_openclip():
    found = [result("neuclip", 0.302, 0.007), result("openclip", 0.3), result("amorlip", 0.2, 0.05)]
    sentence, recommended = conclude(found, about(64), 8.0, {})
    assert sentence == (
        "Nothing beats openclip with confidence at batch 64: neuclip comes nearest, +0.2 (−0.5 to 0.9) R@1; worse: amorlip. "
        "Take openclip with its best setting."
    )
    assert recommended == "openclip"


def test_the_sentence_says_when_the_runs_leave_a_gain_open():
    found = [result("neuclip", 0.305, 0.02), result("openclip", 0.3)]
    sentence, recommended = conclude(found, about(64), 2.8, {})
    assert sentence.startswith(
        "Nothing beats openclip with confidence at batch 64: neuclip comes nearest, +0.5 (−1.5 to 2.5)"
    )
    assert (
        "Runs of 2.8 epochs leave open what longer ones bring: with another --output and --minutes 60 they have about 6."
        in sentence
    )
    nearly = conclude(found, about(64), 20.0, {})[0]
    assert "--minutes 48 they have about 32." in nearly  # no longer than --epochs
    assert recommended == "openclip"
    assert "leave open" not in conclude(found, about(64), 32.0, {})[0]  # as long as --epochs allows


def test_a_sure_gain_comes_before_a_larger_unsure_one():
    found = [result("amorlip", 0.36, 0.08), result("neuclip", 0.34, 0.01), result("openclip", 0.3)]
    sentence, recommended = conclude(found, about(64), 8.0, {"neuclip": gap(0, 0), "amorlip": gap(-0.02, 0.08)})
    assert recommended == "neuclip"
    assert sentence.endswith("no difference between neuclip and amorlip.")


@pytest.mark.parametrize(
    "found", [[], [result("openclip", 0.3)], [result("neuclip", 0.3, 0.1)], [result("neuclip", 0.3)]]
)
def test_without_pairs_there_is_no_result(found):
    sentence, recommended = conclude(found, about(64), 8.0, {})
    assert sentence.startswith("No result yet")
    assert recommended is None


def test_runs_that_failed_are_no_result_either():
    sentence, recommended = conclude([result("openclip", 0.3)], about(64), 8.0, {}, failures=6)
    assert sentence.startswith("No result: 6 runs failed, for the reasons below")
    assert recommended is None


def test_factors_are_rounded_and_have_no_exponents():
    error = {"factor": 2.94, "factor_low": 1.006, "factor_high": 171.3}
    words = judgement({"temperature": 0.07, "batch": error, "samples": 9984}, 32, "Before training")
    assert "misjudges its normalizer by a factor of 2.9 (90 %: 1 to 170), against 9,984 training samples" in words


@pytest.mark.parametrize("groups", [[0, 1, 2, 3], [0, 0, 1, 2], [0, 0, 0, 0]])
def test_guessing_finds_any_sample_of_an_equal_caption(groups):
    random = torch.Generator().manual_seed(0)
    captions = torch.tensor(groups)
    numbers = captions.unique()
    found = []
    for _ in range(1500):  # as pilot.score ranks random embeddings
        image, text = (torch.randn(count, 3, generator=random) for count in (len(groups), len(numbers)))
        image, text = (torch.nn.functional.normalize(part, dim=1) for part in (image, text))
        ranks = {
            RETRIEVAL[0]: 1 + ranks_of_best_match(image, text, captions, numbers),
            RETRIEVAL[1]: 1 + ranks_of_best_match(text, image, numbers, captions)[captions],
        }
        found.append(recall(ranks))
    assert about(8, groups).chance == pytest.approx(statistics.fmean(found), abs=0.03)


# --- data ------------------------------------------------------------------------------------------------------------


def test_the_halves_are_disjoint_and_seeded():
    first, rest = divide(100, 0.5, 1000)
    assert len(first) == 50
    assert sorted(first + rest) == list(range(100))
    assert divide(100, 0.5, 1000) == (first, rest)
    with pytest.raises(ValueError, match="10 of 100 samples are too few"):
        divide(100, 0.1, 1000)


def test_a_text_tower_of_another_kind_stays_as_it_is():
    tokenizer = open_clip.get_tokenizer("demo-vit")
    captions = ["red over blue", "red"]
    tower = torch.nn.Linear(1, 1)
    tower.context_length = 77
    texts = Texts(Tokens.of(captions, tokenizer), tokenizer, tower)
    assert torch.equal(texts(captions), tokenizer(captions))
    assert torch.equal(Texts(None, tokenizer, tower)("red"), tokenizer(["red"]))


def test_hits_are_kept_as_digits():
    assert unpacked("0110").tolist() == [0.0, 1.0, 1.0, 0.0]


# --- the command line ------------------------------------------------------------------------------------------------

COLORS = {"red": (255, 0, 0), "green": (0, 255, 0), "blue": (0, 0, 255), "black": (0, 0, 0), "white": (255, 255, 255)}


def two_colors(number: int) -> list[tuple[str, bytes]]:
    names = list(COLORS)
    upper, lower = number * 7 % 5, number * 3 // 5 % 5
    pixels = np.zeros((16, 16, 3), np.uint8)
    pixels[:8], pixels[8:] = COLORS[names[upper]], COLORS[names[lower]]
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG")
    content = {
        "png": buffer.getvalue(),
        "txt": f"{names[upper]} over {names[lower]}".encode(),
        "cls": str(upper).encode(),
    }
    return [(f"{number:06d}.{field}", data) for field, data in content.items()]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    for split, count in {"train": 80, "val": 60}.items():
        write_tar(tmp_path / split / "00000.tar", [member for n in range(count) for member in two_colors(n)])
    (tmp_path / "names.txt").write_text("".join(f"{name}\n" for name in COLORS))
    return tmp_path


def arguments(data: Path, *more: str) -> list[str]:
    shards = str(data / "train" / "00000.tar")
    flags = "--model demo-vit --batch-size 8 --precision fp32 --lr 1e-3 --epochs 1 --minutes 10 --processes 2"
    sizes = "--population 32 --anchors 16 --losses openclip,queueclip"
    return [shards, *flags.split(), *sizes.split(), "--output", str(data / "out"), *more]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--losses", "openclip"], "expected openclip and at least one other"),
        (["--losses", "neuclip,fastclip"], "expected openclip and at least one other"),
        (["--losses", "openclip,neuclipp"], "unknown loss 'neuclipp'.*neuclip"),
        (["--losses", "openclip,simclr"], "compares two views"),
        (["--losses", "openclip,sogclr", "--views", "2"], "--views 2 compares two views"),
        (["--loss", "neuclip"], "--losses says which"),
        (["--rho", "5"], "--rho has no effect on compare, which searches over it"),
        (["--fit-every", "5"], "--fit-every: not used by any of"),
        (["--save-frequency", "3"], "--save-frequency has no effect on compare"),
        (["--resume", "x.pt"], "--resume has no effect on compare"),
        (["--minutes", "0"], "--minutes is 0, must be positive"),
        (["--batch-size", "0"], "--batch-size is 0, must be at least 2"),
        (["--lr", "nan"], "--lr is nan, must be positive"),
        (["--normalizer", "mlp"], "makes one loss of those that are compared"),
        (["--equal-captions", "mask"], "queueclip with these options: .*the queue keeps"),
        (["--temperature-min", "0.5", "--temperature-max", "0.2"], "--temperature-min: temperature_m"),
        (
            ["--leave-own-out", "--prototypes", "1"],
            "queueclip with these options: leave_own_out=True: needs prototypes",
        ),
        (["--recipe", "cc3m"], "--recipe has the settings of one loss"),
        (["--lr-scheduler", "cosin"], "unknown --lr-scheduler"),
    ],
)
def test_flags_that_mean_nothing_are_refused(data, more, message):
    with pytest.raises(ValueError, match=message):
        parse(arguments(data, *more))


def test_training_flags_before_the_shards_are_refused(data):
    shards, *rest = arguments(data)
    with pytest.raises(ValueError, match="--model stands before SHARDS"):
        parse([*rest[:2], shards, *rest[2:]])
    assert parse(["--minutes", "3", "--leave-own-out", shards, *rest])[0].shards == shards


def test_settings_that_the_bounds_of_the_temperature_rule_out_are_left_out(data):
    _, _, options = parse(arguments(data, "--temperature-min", "0.04"))
    kept = space.settings_of("openclip", options)
    assert {"temperature_scheme": "global", "temperature": 0.03} not in [one.options for one in kept]
    assert len(kept) == len(space.settings_of("openclip", {})) - 1
    assert "temperature=0.03 is smaller than temperature_min=0.04" in space.refusals("openclip", options)[0]


def test_options_of_the_solved_temperature_reach_it(data):
    """No loss uses them by default, but every loss is tried with a solved temperature."""
    _, _, options = parse(arguments(data, "--temperature-queue", "512"))
    settings = space.settings_of("queueclip", options)
    found = [space.options_of("queueclip", one, options) for one in settings]
    assert {one.get("temperature_scheme"): one.get("temperature_queue") for one in found} == {
        "solved": 512,
        "constant": None,
        None: None,
    }


def test_the_help_leaves_out_what_is_refused(capsys):
    with pytest.raises(SystemExit):
        parse(["--help"])
    shown = capsys.readouterr().out
    assert "--prototypes" in shown and "--losses" in shown
    assert not {"--loss", "--rho", "--hard-share", "--temperature", "--views"} & {
        word.strip("[],") for word in shown.split()
    }


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--val", "missing.tar"], "missing.tar"),
        (["--classes", "missing.txt"], "--classes missing.txt cannot be read"),
        (["--batch-size", "50"], "72 training samples are too few for batches of 50"),
        (["--cache", "1e-6"], "--cache allows"),
    ],
)
def test_data_that_do_not_fit_are_refused(data, more, message):
    if "50" in more:  # a held-out part of 8 would be refused first
        more = [*more, "--val", str(data / "val" / "00000.tar"), "--batch-size", "50"]
        message = "80 training samples are too few for batches of 50"
    if "--cache" in more or "--classes" in more:
        write_tar(data / "train" / "00000.tar", [member for n in range(300) for member in two_colors(n)])
    with pytest.raises(ValueError, match=message):
        command.main(arguments(data, *more))


def test_more_bad_samples_than_training_allows_are_refused(data):
    members = [member for n in range(300) for member in two_colors(n) if n % 10 or not member[0].endswith("txt")]
    write_tar(data / "train" / "00000.tar", members)
    with pytest.raises(
        ValueError, match=r"30 of the 300 samples .* more than the allowed 5\.0% \(--max-bad-fraction\)"
    ):
        command.main(arguments(data, "--val", str(data / "val" / "00000.tar")))


def test_a_manifest_may_leave_samples_out(data):
    """Those are not bad samples; read from the shards again and again, they would shorten the runs unseen."""
    shard, val = str(data / "train" / "00000.tar"), str(data / "val" / "00000.tar")
    Manifest.scan(shard).without(range(0, 80, 16)).save(data / "fewer.json")
    argv = [*arguments(data, "--val", val), "--manifest", str(data / "fewer.json")]
    pilot = prepare(*parse(argv)).pilot
    assert pilot.data.num_samples == 75
    with pytest.raises(ValueError, match="leaves samples out"):
        prepare(*parse([*argv, "--cache", str(50_000 / 2**30), "--output", str(data / "other")]))


def test_validation_samples_of_one_caption_are_refused(data):
    same = [(name, b"a dot" if name.endswith("txt") else content) for n in range(40) for name, content in two_colors(n)]
    write_tar(data / "val" / "00000.tar", same)
    with pytest.raises(ValueError, match="one caption only"):
        command.main(arguments(data, "--val", str(data / "val" / "00000.tar")))


def test_a_batch_is_not_judged_against_itself(data):
    val = str(data / "val" / "00000.tar")
    pilot = prepare(*parse(arguments(data, "--val", val, "--population", "8"))).pilot
    assert pilots.judge_batch(pilot, torch.device("cpu"), lambda samples: None)["samples"] == 64


@pytest.mark.parametrize(("loss", "same"), [("isogclr", True), ("queueclip", True), ("amorlip", False)])
def test_the_batch_is_judged_at_the_losss_own_temperatures(data, loss, same):
    """Unless the loss's normalizers are others, with the positive pair."""
    argv = arguments(data, "--val", str(data / "val" / "00000.tar"), "--losses", f"openclip,{loss}")
    pilot = prepare(*parse(argv)).pilot
    run = Run("", configurations(loss, {})[0], 1e-3, 0, 80, True)
    found = run_pilot(pilot, run, torch.device("cpu"), lambda samples: None)["normalizers"]
    assert (found["batch"] == found["own_batch"]) == same


def test_a_run_that_diverged_is_scored(data):
    pilot = prepare(*parse(arguments(data, "--val", str(data / "val" / "00000.tar")))).pilot
    run = Run("", configurations("openclip", {})[0], 1e12, 0, 80, True)
    line = run_pilot(pilot, run, torch.device("cpu"), lambda samples: None)
    assert "normalizers" not in line
    assert line["choice"] < 0.1  # everything comes last


def test_the_end_of_a_text_with_the_token_0_is_kept():
    """Token 0 is OpenCLIP's padding, and also "!" inside of "!="."""
    tokenizer = open_clip.get_tokenizer("demo-vit")
    texts = ["see a !~ b and c", "a dog"]
    tokens = tokenizer(texts)
    assert (tokens[0] == 0).nonzero()[0] < tokens[0].argmax()
    assert Tokens.of(texts, tokenizer).length == int(tokens[0].argmax()) + 1


def prepared(data: Path, *more: str) -> PilotData:
    pilot = prepare(*parse(arguments(data, "--val", str(data / "val" / "00000.tar"), *more))).pilot
    return pilot.data


def test_data_that_have_changed_are_decoded_again(data):
    before = prepared(data)
    assert prepared(data).digest == before.digest
    change_shards(data)
    after = prepared(data)
    assert (before.num_samples, after.num_samples) == (80, 90)
    assert after.verdict.classes() is None
    assert prepared(data, "--classes", str(data / "names.txt")).verdict.classes() is not None


def change_shards(data: Path) -> None:
    write_tar(data / "train" / "00000.tar", [member for n in range(90) for member in two_colors(n)])
    (data / "train" / "00000.tar").with_name("manifest.json").unlink(missing_ok=True)


def test_images_of_a_csv_file_that_have_changed_are_decoded_again(data):
    (data / "images").mkdir()
    for number in range(60):
        (data / "images" / f"{number}.png").write_bytes(two_colors(number)[0][1])
    rows = [f"{data}/images/{number}.png\t{two_colors(number)[1][1].decode()}" for number in range(60)]
    (data / "val.csv").write_text("\n".join(["filepath\ttitle", *rows]) + "\n")
    argv = [*arguments(data, "--val", str(data / "val.csv")), "--dataset-type", "csv"]
    argv[0] = str(data / "val.csv")

    def decoded() -> set[str]:
        return {folder.name for folder in prepare(*parse(argv)).caches}

    before = decoded()
    assert decoded() == before
    (data / "images" / "7.png").write_bytes(two_colors(8)[0][1])
    assert not decoded() & before


def test_caches_of_other_data_are_removed_but_nothing_else(data):
    for folder, file in {"old": "pixels.bin", "of somebody": "letter.txt", "kept": "pixels.bin"}.items():
        (data / "cache" / folder).mkdir(parents=True)
        (data / "cache" / folder / file).write_text("")
    remove_others(data / "cache", [data / "cache" / "kept"])
    assert sorted(folder.name for folder in (data / "cache").iterdir()) == ["kept", "of somebody"]


def test_runs_of_another_comparison_do_not_count(data):
    """They are there where somebody removed plan.json."""
    config, training, options = parse(arguments(data, "--val", str(data / "val" / "00000.tar")))
    ready = prepare(config, training, options)
    results = ResultsFile(data / "runs.jsonl")
    results.add({"id": "a", "context": "another"})
    found = Comparison(config, ready.pilot, ready.notes, results, Deadline(1, 0.0))
    assert found._known() == {}
    results.add({"id": "b", "context": found.context})
    assert list(found._known()) == ["b"]
    results.close()


def test_the_reports_search_is_that_of_the_plan():
    plans = schedule()
    results = finish(plans.search({}))
    assert plans.searched(results)[:4] == next(plans.rungs(BASELINE, results))
    assert len(plans.searched(results)) == len(LOSSES) * (4 + 2)


def test_two_comparisons_do_not_share_a_folder(data):
    """Not even while they decode."""
    results = ResultsFile(data / "out" / "runs.jsonl")
    with pytest.raises(ValueError, match="another process is writing"):
        command.main(arguments(data))
    assert not (data / "out" / "cache").exists()
    results.close()


def test_a_class_that_has_no_name_is_refused(data):
    (data / "names.txt").write_text("red\ngreen\n")
    val = str(data / "val" / "00000.tar")
    with pytest.raises(ValueError, match=r"has the class '\d': expected .* from 0 to 1"):
        command.main(arguments(data, "--val", val, "--classes", str(data / "names.txt")))


TIMES = {"step_seconds", "memory_bytes", "curves", "command"}


def lasting(path: Path) -> dict[str, Any]:
    """A report without what differs between two measurements."""
    content = json.loads(path.read_text())
    content["results"] = [{key: one[key] for key in one.keys() - TIMES} for one in content["results"]]
    return content


def test_a_comparison_from_data_to_report(data, capsys, monkeypatch):
    """Interrupted, gone on with, and repeated."""
    monkeypatch.setattr(designs, "_PLANS", (designs._Plan((), 3, 0),))
    monkeypatch.setattr(designs, "MOST_SEEDS", 4)
    monkeypatch.setattr(comparison, "_PACE_SECONDS", 0.1)
    more = ["--val", str(data / "val" / "00000.tar"), "--classes", str(data / "names.txt")]
    argv, out = arguments(data, *more), data / "out"

    with monkeypatch.context() as patch:
        finished = Workers.finished

        def stop_after_two(workers: Workers) -> Any:
            if (out / "runs.jsonl").read_bytes().count(b"\n") >= 2:
                raise KeyboardInterrupt
            return finished(workers)

        patch.setattr(Workers, "finished", stop_after_two)
        with pytest.raises(SystemExit, match="130"):
            command.main(argv)
    assert "No result yet" in capsys.readouterr().out
    assert json.loads((out / "report.json").read_text())["unfinished"] == 12
    first = (out / "runs.jsonl").read_text().splitlines()

    command.main(argv)
    printed, lines = capsys.readouterr().out, (out / "runs.jsonl").read_text().splitlines()
    assert lines[: len(first)] == first
    assert len(lines) == 2 * (3 + 3 * 2)
    written = lasting(out / "report.json")
    assert "your batch of 8 misjudges its normalizer by a factor of" in printed
    assert written["sentence"] in printed
    assert written["unfinished"] == 0
    assert sorted(one["loss"] for one in written["results"]) == ["openclip", "queueclip"]
    assert all(len(one["each_seed"]) == 4 and "zero_shot" in one["scores"] for one in written["results"])
    page = (out / "report.html").read_text()
    assert page.count("<svg") == 2
    assert "http" not in page.replace("http://www.w3.org/", "")  # SVG's namespaces
    assert "| queueclip |" in (out / "report.md").read_text()

    (out / "runs.jsonl").write_text("".join(f"{line}\n" for line in lines[:-2]) + lines[-2][:50])
    command.main(argv)
    assert lasting(out / "report.json") == written
    assert len((out / "runs.jsonl").read_text().splitlines()) == len(lines)

    # A refused command removes nothing.
    caches = set((out / "cache").iterdir())
    with pytest.raises(ValueError, match="comparison with other flags or versions"):
        command.main([*argv, "--wd", "0.1"])
    assert set((out / "cache").iterdir()) == caches
    change_shards(data)
    with pytest.raises(ValueError, match="comparison with other data"):
        command.main(argv)
    assert set((out / "cache").iterdir()) > caches


def test_the_recommended_command_line_trains_that_configuration(data):
    add_model_configs()
    argv = arguments(data, "--val", str(data / "val" / "00000.tar"), "--warmup", "3", "--wd", "0.1")
    config, training, options = parse(argv)
    ready = prepare(config, training, options)
    results = ResultsFile(data / "runs.jsonl")
    pilot = ready.pilot
    of_folder = Comparison(config, pilot, ready.notes, results, None)
    solved = next(one for one in configurations(BASELINE, {}) if "rho" in one.setting.options)
    run = Run("", solved, 1e-3, 0, 48, True)
    line = run_pilot(pilot, run, torch.device("cpu"), lambda samples: None)
    results.close()
    words = shlex.split(of_folder.command_line(line))
    assert words[:2] == ["openclip-ext", "train"]
    args, choice = flags.parse(words[2:])
    assert choice.name == "openclip"
    assert choice.options["temperature_scheme"] == "solved"
    assert (args.lr, args.wd, args.warmup, args.epochs, args.train_num_samples) == (1e-3, 0.1, 1, 1, 48)
    assert args.model == "demo-vit"
    for loss in DEFAULT_LOSSES:
        options = configurations(loss, {})[0].setting.options
        words = shlex.split(of_folder.command_line({**line, "configuration": {"loss": loss}, "options": options}))
        assert flags.parse(words[2:])[1].options.items() >= options.items()
    again = run_pilot(pilot, run, torch.device("cpu"), lambda samples: None)
    assert {key: again[key] for key in ("hits", "temperature", "normalizers")} == {
        key: line[key] for key in ("hits", "temperature", "normalizers")
    }


def test_losses_see_the_same_samples_from_the_same_start(data, monkeypatch):
    config, training, options = parse(arguments(data, "--val", str(data / "val" / "00000.tar")))
    pilot = prepare(config, training, options).pilot
    seen: dict[str, list[Any]] = {}
    for loss in ("openclip", "queueclip"):
        trained = pilots._Training(pilot, Run("", configurations(loss, {})[0], 1e-3, 1, 48, False), torch.device("cpu"))
        seen[loss] = [trained.model.text_projection.sum().item()]
        for batch in trained.loader.iterate(0, []):
            seen[loss] += [batch["index"].tolist(), batch["image"].sum().item()]
    assert seen["openclip"] == seen["queueclip"]
    assert len(seen["openclip"]) == 1 + 2 * 6


def test_training_images_beyond_the_cache_are_read_from_their_shards(data):
    val = str(data / "val" / "00000.tar")
    argv = arguments(data, "--val", val)
    config, training, options = parse(argv)
    cached = prepare(config, training, options).pilot
    config, training, options = parse([*argv, "--cache", str(50_000 / 2**30), "--output", str(data / "other")])
    ready = prepare(config, training, options)
    streamed, notes = ready.pilot, ready.notes
    assert "decoded again for each run" in notes[-1]
    assert streamed.data.num_samples == cached.data.num_samples == 80
    run = Run("", configurations("queueclip", {})[0], 1e-3, 0, 48, False)
    assert run_pilot(streamed, run, torch.device("cpu"), lambda samples: None)["steps"] == 6
