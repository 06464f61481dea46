"""The command ``compare``: its candidates, its time plan, its conclusion, and a full comparison on a tiny data set."""

import json
import math
import re
import shlex
import sys
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from openclip_ext.checkpoint.format import load_model_file
from openclip_ext.compare import comparison, plan
from openclip_ext.compare.comparison import Comparison, main, open_trials
from openclip_ext.compare.config import parse
from openclip_ext.compare.data import prepare
from openclip_ext.compare.plan import SEEDS, Costs, equal_epochs, plan_first, plan_next
from openclip_ext.compare.report import About, conclude, make_report, markdown, page, tables
from openclip_ext.compare.space import BASELINE, DEFAULT_LOSSES, candidates
from openclip_ext.compare.trial import RETRIEVAL, pack, unpack
from openclip_ext.compare.trials import Run, Rung, Trials, read_results
from openclip_ext.data.loader.eval_loader import EvalLoader
from openclip_ext.data.manifest.manifest import Manifest
from openclip_ext.evaluation.encoder import Encoder
from openclip_ext.evaluation.statistics import Difference, paired_difference
from openclip_ext.losses import registry
from openclip_ext.losses.openclip import OpenClipLoss
from openclip_ext.training import flags
from openclip_ext.training.main import main as train
from openclip_ext.training.plan import resolve
from openclip_ext.training.validation import Validation
from tests.compare.colors import members, write_names
from tests.data.shards import image_bytes, write_csv, write_tar
from tests.data.test_reference import write_store
from tests.training.test_models import VISION, model_folder

COSTS = Costs(per_sample={BASELINE: 1e-3, "neuclip": 2e-3}, per_run=3.0)
CPU = torch.device("cpu")


# --- candidates -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("loss", DEFAULT_LOSSES)
def test_candidates_differ_and_can_be_built(loss):
    found = candidates(loss, {})
    for options, _ in found:
        registry.create_loss(loss, embed_dim=8, num_samples=100, **options)
    assert len({json.dumps(one) for one in found}) == len(found) >= 9
    assert {factor for _, factor in found} == {0.5, 1.0, 2.0}


def test_settings_keep_the_users_options_and_a_losss_own_temperature_scheme():
    assert all(options["gamma"] == 0.5 for options, _ in candidates("fastclip", {"gamma": 0.5}))
    for loss, scheme in {"sogclr": "constant", "isogclr": "per-sample", "tempnet": "predicted"}.items():
        assert {options.get("temperature_scheme", scheme) for options, _ in candidates(loss, {})} == {scheme}


# --- the plan ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("minutes", "processes"), [(2, 8), (2, 20), (30, 4), (30, 2), (300, 1)])
def test_the_rungs_fit_the_time_and_use_it(minutes, processes):
    """All runs of a rung are equally long, so the processes work in rounds, and the last round may be incomplete."""
    costs, seconds = Costs(dict.fromkeys(DEFAULT_LOSSES, 1e-3), 1.0), 60 * minutes
    tried, first = plan_first(costs, seconds, processes, 16, 10**9, most_tried=18, minutes=minutes)
    assert first.seeds == SEEDS[:1] and first.samples % 16 == 0 and first.samples >= 20 * 16
    spent = math.ceil(tried * 5 / processes) * (1 + first.samples * 1e-3)
    going_on = Costs(dict.fromkeys(DEFAULT_LOSSES[:3], 1e-3), 1.0)
    second = plan_next(first, going_on, seconds - spent, processes, 16, 10**9)
    assert second is not None and second.seeds == SEEDS and second.samples > 2.4 * first.samples
    # Two runs of each of three losses select the runs with the other two seeds.
    spent += {1: 12, 2: 6, 4: 3, 8: 2, 20: 2}[processes] * (1 + second.samples * 1e-3)
    assert 0.99 * seconds < spent <= seconds


def test_a_rung_is_followed_by_longer_runs_then_by_more_seeds():
    tuned, whole = Rung(320, SEEDS[:1]), Rung(640, SEEDS)
    assert plan_next(tuned, COSTS, 10.0, 2, 16, most_samples=10**9) == Rung(320, SEEDS)  # no time for longer runs
    assert plan_next(tuned, COSTS, 1000.0, 2, 16, most_samples=640) == whole
    seconds = COSTS.per_run + 640 * 2e-3
    assert plan_next(whole, COSTS, seconds - 0.1, 2, 16, most_samples=640) is None
    assert plan_next(whole, COSTS, seconds, 2, 16, most_samples=640) == Rung(640, (0, 1, 2, 3))
    # If a finished comparison gets more minutes, its next runs are longer.
    assert plan_next(whole, COSTS, 1e4, 2, 16, most_samples=10**6).samples > 640


@pytest.mark.parametrize("losses", [2, 3, 5])
@pytest.mark.parametrize("processes", [1, 3])
@pytest.mark.parametrize(("per_run", "most_samples"), [(0.0, 10**9), (30.0, 10**9), (30.0, 80)])
def test_too_short_a_time_is_told_with_the_least(losses, processes, per_run, most_samples):
    """The minimum of --minutes suffices, and a minute less does not."""
    costs = Costs(dict.fromkeys(DEFAULT_LOSSES[:losses], 0.2), per_run)

    def plan_minutes(minutes: float, spent: float = 2.5) -> tuple[int, Rung]:
        left = 60 * (minutes - spent) * (1 - plan.RESERVE)
        return plan_first(costs, left, processes, 16, most_samples, 18, minutes)

    with pytest.raises(
        ValueError, match=r"--minutes 3 is too short: .* only 0\.[45] are left .* fewer --losses"
    ) as error:
        plan_minutes(3)
    least = int(re.search(r"at least --minutes (\d+)", str(error.value))[1])
    stage = plan_minutes(least)[1]
    assert stage.samples >= min(most_samples, 20 * 16)
    assert stage.seeds == (SEEDS if losses <= 3 else SEEDS[:1])  # up to three losses need no second rung
    with pytest.raises(ValueError, match=rf"Give at least --minutes {least}"):
        plan_minutes(least - 1)


def test_a_run_is_cut_into_equal_epochs():
    assert equal_epochs(1000, 10, 400) == (3, 330)
    assert equal_epochs(100, 10, 405) == (1, 100)
    assert equal_epochs(19_660, 256, 1000) == (25, 768)  # 26 epochs would have 2 steps each
    assert equal_epochs(32 * 768, 256, 1000) == (32, 768)  # already equal epochs


# --- the conclusion ---------------------------------------------------------------------------------------------------


def gap(mean: float, half: float) -> Difference:
    return Difference(mean, mean - half, mean + half, 3)


def result(loss: str, gain: float, half: float, epochs: float = 8.0) -> Any:
    """Return a loss's result: its gain over ``openclip``, with an interval of ± ``half``."""
    return SimpleNamespace(loss=loss, gain=gain, difference=gap(gain, half), epochs=epochs)


BASE = SimpleNamespace(loss=BASELINE, gain=0.0, difference=None)


@pytest.mark.parametrize(
    ("found", "to_best", "words", "recommended"),
    [
        (
            [result("queueclip", 0.041, 0.009), result("neuclip", 0.039, 0.009), BASE],
            {"neuclip": gap(0.002, 0.01), "openclip": gap(0.041, 0.009), "amorlip": gap(0.02, 0.01)},
            ["queueclip, +4.1 (3.2 to 5.0) R@1 over openclip", "no difference between queueclip and neuclip."],
            "queueclip",
        ),
        (
            [result("neuclip", 0.002, 0.007), BASE, result("amorlip", -0.02, 0.01)],
            {},
            ["Nothing beats openclip", "neuclip is nearest", "; worse: amorlip."],
            "openclip",
        ),
        (  # a significant gain is preferred to a larger gain that is not significant
            [result("amorlip", 0.06, 0.08), result("neuclip", 0.04, 0.01), BASE],
            {"neuclip": gap(0, 0), "amorlip": gap(-0.02, 0.08)},
            ["neuclip, +4.0 (3.0 to 5.0) R@1", "no difference between neuclip and amorlip"],
            "neuclip",
        ),
        (  # a loss that a later call added has only the first, shorter runs
            [result("neuclip", 0.02, 0.01), BASE, result("amorlip", 0.05, 0.01, epochs=2.0)],
            {"neuclip": gap(0, 0)},
            ["neuclip, +2.0 (1.0 to 3.0) R@1 over openclip at batch 64."],
            "neuclip",
        ),
        ([BASE], {}, ["No result yet"], None),
    ],
)
def test_the_sentence_names_what_to_take(found, to_best, words, recommended):
    sentence, taken = conclude(found, 64, to_best)
    assert taken == recommended and all(word in sentence for word in words), sentence
    assert conclude([], 64, {}, failed=3)[0].startswith("No result: 3 runs failed, for the reasons below.")


def finished_trials(path: Path) -> Trials:
    """Return a rung of short runs of three losses, and a rung of long runs of two of them with three seeds."""
    trials = Trials(path)
    for number, (losses, seeds) in enumerate(
        {("openclip", "queueclip", "amorlip"): (0,), ("openclip", "queueclip"): SEEDS}.items()
    ):
        trials.plan_rung(Rung(50 + 150 * number, seeds))
        for loss in losses:
            setting = {"loss": loss, "options": {}}
            short = [Run("", "", "", 10, 1, lr, 0, loss, setting, 50) for lr in ((1e-3,) if number else (1e-3, 2e-3))]
            runs = [replace(run, epochs=2, epoch_samples=100) for run in short] if number else short
            trials.plan(number, runs)
            trials.plan(number, [replace(runs[0], seed=seed) for seed in seeds[1:]])
    for run in {**trials.planned[0], **trials.planned[1]}.values():
        hits = {"openclip": 3, "queueclip": 4, "amorlip": 5}[run.family] + (run.epochs - 1) * (2 + run.seed)
        hits += run.epochs - 1 if run.family == "queueclip" and run.seed else 0
        counts = {RETRIEVAL[0]: hits - 2, RETRIEVAL[1]: hits, "zero_shot": hits - 1 - (run.family == "queueclip")}
        row = {
            "id": run.id,
            **asdict(run),
            "val": {"mean": 0.3 - 100 * run.lr},
            "hits": {name: pack((torch.arange(10) < count).double()) for name, count in counts.items()},
            "temperature": 0.04 + 0.01 * run.seed**2,
            "seconds": 3.0 + run.seed**2,
            "steps": 20,
            "memory_bytes": (5 + run.seed) * 2**20,
            "state_bytes": 2**19,
            "curve": [[50, 1.0 + run.seed, 0.1 * run.seed], [100, 2.0 + run.seed, 0.2]],
        }
        has_failed = (run.family, run.epochs, run.seed) == ("openclip", 2, 2)
        trials.keep(run.id, None if has_failed else row, " no memory")
    return trials


def test_the_report_shows_the_numbers_of_its_runs(tmp_path):
    trials = finished_trials(tmp_path / "trials.jsonl")
    about = About("shards", "model", 10, 100, 0.05, (), 1)
    losses, samples = ("openclip", "queueclip", "amorlip"), (range(10), [*"abcdefghij"])
    found = make_report(about, trials, losses, *samples, lambda row: f"{row['family']} {row['seed']}")
    assert found.sentence.startswith(
        "Nothing beats openclip with confidence at batch 10: queueclip is nearest, +15.0 (−49.7"
    )
    assert (found.unfinished, found.failures) == (1, ("a run failed: no memory",))
    assert found.left_behind == ("amorlip",) and found.recommended == "openclip" and "openclip 0" in markdown(found)
    assert "openclip, 0.001, is the smallest one tried" in markdown(found) and "--lr 0.0005" in found.rate_advice
    better_before = make_report(replace(about, before=0.5), trials, losses, *samples, lambda row: "")
    assert "50.0 before" in better_before.sentence and "before" not in found.sentence
    hits = [torch.tensor([[1.0] * n + [0.5] * 2 + [0.0] * (8 - n) for n in of_seeds]) for of_seeds in ((4, 6), (3, 4))]
    assert found.results[0].difference == paired_difference(*hits, range(10))
    shown = {title: [" | ".join(row) for row in rows[1:]] for title, rows in tables(found).items()}
    assert shown.pop("All runs")[-1] == "queueclip | τ solved | 0.001 | 2.0 | 3 | 20.0 | 66.7"
    assert shown == {
        "Result": [
            "queueclip | +15.0 (−49.7 to 79.7) | 66.7 | 2.0 | 56.7 | 76.7 | 56.7, +5.0 (−59.5 to 69.5) | τ solved | 0.001"
            " | 50.0 70.0 80.0",
            "openclip |  | 45.0 | 2.0 | 35.0 | 55.0 | 45.0 | τ learned | 0.001 | 40.0 50.0",
            "amorlip | +20.0, one seed | 40.0 | 0.5 | 30.0 | 50.0 | 40.0 | τ learned | 0.001 | 40.0",
            "before training |  | 5.0 | 0.0 |  |  |  |  |  | ",
        ],
        "Gain by length": ["queueclip | 0.5 | +10.0 | 1", "queueclip | 2.0 | +15.0 | 2", "amorlip | 0.5 | +20.0 | 1"],
        "Cost": [
            "queueclip | 200.0 | 7.0 | 0.5 | 0.057",
            "openclip | 175.0 | 6.0 | 0.5 | 0.045",
            "amorlip | 150.0 | 5.0 | 0.5 | 0.040",
        ],
    }
    # The curves are means over the two seeds that both losses have. The shorter runs of amorlip have no curve.
    drawn = page(found)
    for hint in ("5 at 50 samples seen", "20 at 100 samples seen", "5 at 1.5 seconds of training"):
        assert f"<title>queueclip: {hint}" in drawn
    assert "<title>openclip: " in drawn and "<title>amorlip: " not in drawn
    first, second = (next(run.id for run in trials.planned[1].values() if run.seed == seed) for seed in (1, 2))
    trials.done[second] = trials.done.pop(first) | {"seed": 2}
    drawn = page(make_report(about, trials, losses, *samples, lambda row: ""))
    assert "<title>queueclip: 10 at 50 samples seen" in drawn  # the mean over the seeds 0 and 2


# --- the command line -------------------------------------------------------------------------------------------------


def write_data(folder: Path) -> Path:
    for split, count in {"train": 80, "val": 60}.items():
        write_tar(folder / split / "00000.tar", members(count))
    write_names(folder)
    return folder


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return write_data(tmp_path)


def arguments(data: Path, *more: str) -> list[str]:
    shards = str(data / "train" / "00000.tar")
    flags = "--model demo-vit --batch-size 8 --precision fp32 --lr 1e-3 --epochs 1 --minutes 10 --processes 2"
    return [shards, *flags.split(), "--losses", "openclip,queueclip", "--output", str(data / "out"), *more]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--losses", "neuclip,fastclip"], "expected openclip and at least one other"),
        (["--losses", "openclip,neuclipp"], "unknown loss 'neuclipp'.*neuclip"),
        (["--rho", "5"], "--rho is tuned by compare"),
        (["--hard-share", "0.1"], "--rho is tuned by compare"),
        (["--batch-size", "1"], "--batch-size 1: expected at least 2"),
        (["--fit-every", "5"], "--fit-every: not used by any of"),
        (["--distill", "0.5"], "--distill: needs --reference FOLDER"),
        (["--dataset-type", "csv", "--train-data", __file__], "--train-data has no effect on compare"),
    ],
)
def test_flags_that_mean_nothing_are_refused(data, more, message):
    with pytest.raises(ValueError, match=message):
        parse(arguments(data, *more))


def with_val(data: Path, *more: str) -> list[str]:
    return arguments(data, "--val", str(data / "val" / "00000.tar"), *more)


def opened(argv: list[str]) -> Comparison:
    config, training = parse(argv)
    return Comparison(config, training, prepare(config, training)[0], open_trials(config, training), 0.0)


def make_run(loss: str, samples: int = 80, lr: float = 1e-3, seed: int = 0, candidate: int = 0) -> Run:
    setting = {"loss": loss, "options": candidates(loss, {})[candidate][0]}
    return Run("", "demo-vit", "", 8, 1, lr, seed, loss, setting, samples)


def execute(compared: Comparison, run: Run) -> dict[str, Any]:
    return compared.task(run)(CPU, lambda samples: None)


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> Comparison:
    """Return a prepared comparison that has not run anything yet."""
    return opened(with_val(write_data(tmp_path_factory.mktemp("compared")), "--warmup", "3", "--wd", "0.1"))


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--val", "{val}", "--batch-size", "50"], "80 training samples are too few for batches of 50"),
        ([], "8 of 80 samples are too few for the scores"),
        (["--val", "{train}::{val}"], "--val: 1 of 2 files are also training files: remove them from --val"),
        (["--val", "{bad}"], r"8 of the 80 samples .* allowed 5\.0% \(--max-bad-fraction\)"),
    ],
)
def test_data_that_do_not_fit_are_refused(data, more, message):
    places = {"val": data / "val" / "00000.tar", "bad": data / "bad.tar", "train": data / "val/../train/00000.tar"}
    write_tar(places["bad"], [member for member in members(80) if not member[0].endswith("7.txt")])
    with pytest.raises(ValueError, match=message):
        main(arguments(data, *(word.format(**places) for word in more)))


def test_a_manifest_may_leave_samples_out(data):
    """Samples that the manifest excludes are not read. If they counted as bad samples, runs would become shorter."""
    Manifest.scan(str(data / "train" / "00000.tar")).without(range(0, 80, 16)).save(data / "fewer.json")
    argv = with_val(data, "--manifest", str(data / "fewer.json"))
    assert opened(argv).data.num_samples == 75
    with pytest.raises(ValueError, match="excludes samples"):
        opened([*argv, "--cache", str(50_000 / 2**30), "--output", str(data / "other")])


def test_captions_of_mirrored_images_have_tokens(data):
    write_tar(data / "train" / "00000.tar", [(name, part.replace(b"over", b"left of")) for name, part in members(80)])
    texts = opened(with_val(data, "--caption-aware-flip")).data.texts.texts
    assert {"red left of blue", "red right of blue"} <= {*texts}


def test_a_run_that_diverged_is_scored(data):
    row = execute(
        opened(with_val(data, "--max-skipped-steps", "3", "--opt", "lamb")), make_run(BASELINE, lr=1e12, seed=1)
    )
    assert row["steps"] in range(3, 10)  # of ten planned steps
    assert row["val"]["mean"] < 0.1  # every match ranks last
    assert not unpack(row["hits"][RETRIEVAL[0]]).any()


def test_validation_in_training_gives_the_scores_of_a_run(compared):
    """The validation samples repeat captions and images."""
    trial, samples = compared.task(make_run(BASELINE)).build(CPU), compared.data.val
    assert len({*samples.captions()}) < len({*samples.rows}) and len({*samples.image_hashes()}) < len({*samples.rows})
    transforms = {"preprocess": trial.built.preprocess_val, "tokenizer": trial.built.tokenizer}
    encoder = Encoder(trial.model.eval(), *transforms.values(), CPU)
    metrics = Validation(EvalLoader(samples, **transforms, batch_size=7)).score(encoder)
    for name, found in trial.ranks(samples).items():
        assert 0 < float(found.hits().mean()) == pytest.approx(metrics[name])


@pytest.mark.parametrize("kind", ["csv", "classes"])
def test_images_that_have_changed_are_decoded_again(kind, data):
    sets = [str(write_images(kind, data / part)) for part in ("train", "val")]
    argv = [sets[0], *arguments(data)[1:], "--val", sets[1]]
    before = opened(argv).data.digest
    assert opened(argv).data.digest == before
    (image,) = (data / "train").rglob("7.jpg")
    image.write_bytes(image_bytes(8))
    assert opened(argv).data.digest != before


def write_images(kind: str, folder: Path) -> Path:
    """Write 60 images with a CSV file, or in two class folders; return the path of the data set."""
    if kind == "csv":
        return write_csv(folder, rows=60)
    for number in range(60):
        place = folder / "classes" / ("even", "odd")[number % 2]
        place.mkdir(parents=True, exist_ok=True)
        (place / f"{number}.jpg").write_bytes(image_bytes(number))
    return folder / "classes"


TIMES = {"step_seconds", "memory_bytes", "curves", "command"}


def lasting(path: Path) -> dict[str, Any]:
    """Return the content of a report without its measured times, which differ between runs."""
    content = json.loads(path.read_text())
    content["results"] = [{key: one[key] for key in one.keys() - TIMES} for one in content["results"]]
    return content


def test_the_command_tells_the_least_time_and_of_a_slow_precision(data, caplog):
    losses = "openclip,queueclip,fastclip,neuclip"
    with pytest.raises(ValueError, match=r"--minutes 0.001 .*runs of 4 losses .* at least --minutes \d+"):
        main(with_val(data, "--losses", losses, "--minutes", "0.001", "--precision", "amp"))
    assert ("--precision fp32" in caplog.text) == (not torch.cuda.is_available())
    assert not (data / "out" / "report.json").exists()


def test_a_comparison_from_data_to_report(data, capsys, monkeypatch):
    """The comparison is interrupted, resumed, repeated with a truncated results file, and extended by a loss."""
    monkeypatch.setattr(plan, "_TRIED", ((3, 0),))
    monkeypatch.setattr(plan, "MOST_SEEDS", 3)
    monkeypatch.setattr(comparison, "_PROBE_SECONDS", 0.1)
    more = ["--val", str(data / "val" / "00000.tar"), "--classes", str(data / "names.txt")]
    argv, out = arguments(data, *more), data / "out"

    costs: list[Costs] = []
    monkeypatch.setattr(plan, "plan_first", lambda of, *rest, **more: costs.append(of) or plan_first(of, *rest, **more))
    with monkeypatch.context() as patch:
        keep = Trials.keep

        def stop_after_two(trials: Trials, *row: Any) -> None:
            keep(trials, *row)
            if len(trials.done) >= 2:
                raise KeyboardInterrupt

        patch.setattr(Trials, "keep", stop_after_two)
        with pytest.raises(SystemExit, match="130"):
            main(argv)
    assert "No result yet" in capsys.readouterr().out
    assert len({*costs[0].per_sample.values()}) == 2  # each loss is probed
    table = out / "trials.jsonl"
    first = read_results(table)
    assert json.loads((out / "report.json").read_text())["unfinished"] == 6 - len(first)

    main(argv)
    printed, rows = capsys.readouterr().out, read_results(table)
    assert rows.items() >= first.items()
    assert len(rows) == 2 * (3 + 2)  # for each loss, three settings with seed 0, and the best with two more seeds
    written = lasting(out / "report.json")
    assert written["sentence"] in printed
    commands = [one["command"] for one in json.loads((out / "report.json").read_text())["results"]]
    assert any(command in printed.splitlines() for command in commands)
    assert written["unfinished"] == 0
    assert sorted(one["loss"] for one in written["results"]) == ["openclip", "queueclip"]
    assert all(len(one["each_seed"]) == 3 and "zero_shot" in one["scores"] for one in written["results"])
    assert (out / "report.html").read_text().count("<svg") == 2
    assert "| loss | minus openclip |" in (out / "report.md").read_text()  # the most important columns come first

    lines = table.read_text().splitlines()
    last = [place for place, line in enumerate(lines) if '"status": "done"' in line][-2]
    table.write_text("".join(f"{line}\n" for line in lines[:last]) + lines[last][:50])  # killed during a write
    main(argv)
    assert lasting(out / "report.json") == written and read_results(table).keys() == rows.keys()

    # Runs of openclip and queueclip are reused.
    main([*argv, "--losses", "openclip,queueclip,sogclr"])
    assert {row["family"] for name, row in read_results(table).items() if name not in rows} == {"sogclr"}

    # A command that is rejected removes no cache.
    caches = set((out / "cache").iterdir())
    with pytest.raises(ValueError, match="comparison with different flags, versions or pretrained weights"):
        main([*argv, "--wd", "0.1"])
    assert set((out / "cache").iterdir()) == caches
    write_tar(data / "train" / "00000.tar", members(90))
    (data / "train" / "manifest.json").unlink(missing_ok=True)
    with pytest.raises(ValueError, match="comparison with different data"):
        main(argv)
    assert set((out / "cache").iterdir()) > caches


@pytest.mark.parametrize(("loss", "candidate"), [(BASELINE, 2), ("queueclip", 0)])
def test_a_run_trains_the_model_of_the_printed_command(data, loss, candidate):
    """This needs samples that training also reads in any order. The text tower without unused tokens rounds differently."""
    (data / "others").mkdir()
    table, others = (str(write_csv(folder, rows=60)) for folder in (data, data / "others"))
    more = ["--val", others, "--dataset-type", "csv", "--wd", "0.1", "--device", "cpu"]
    compared = opened([table, *arguments(data)[1:], *more])
    run = make_run(loss, 48, candidate=candidate)
    trial = compared.task(run).build(CPU)
    assert [*trial.run_steps()][-1] == 6
    program, command, *words = shlex.split(compared.command_line(asdict(run)))
    assert (program, command) == ("openclip-ext", "train")
    train([*words, "--workers", "0", "--logs", str(data), "--name", "run"])
    trained = load_model_file(data / "run" / "checkpoints" / "epoch_1.pt")["state_dict"]
    for name, value in trial.model.state_dict().items():
        if value.shape == trained[name].shape:
            torch.testing.assert_close(value, trained[name], rtol=0, atol=2e-4)  # a step changes weights by up to 1e-3


@pytest.mark.parametrize("loss", DEFAULT_LOSSES)
def test_the_printed_command_has_the_settings_of_the_run_and_equal_runs_have_equal_results(compared, loss):
    solved = next((place for place, (options, _) in enumerate(candidates(loss, {})) if "rho" in options), 0)
    run = make_run(loss, 48, candidate=solved, lr=1 / 3)
    config = resolve(flags.parse(shlex.split(compared.command_line(asdict(run)))[2:]))
    assert config.loss.options.items() >= run.setting["options"].items()
    assert (config.optimizer.lr, config.schedule.warmup, config.data.num_samples) == (1 / 3, 0, 48)
    if loss == BASELINE:
        row, again = (execute(compared, run) for _ in range(2))
        assert all(again[key] == row[key] for key in ("hits", "temperature"))


@pytest.mark.parametrize(("more", "steers"), [((), True), (("--no-steer", "--distill", "0.5"), False)])
def test_a_reference_model_is_in_every_loss_except_the_baseline(data, more, steers):
    store = write_store(data / "reference", str(data / "train" / "00000.tar"), width=7)
    compared = opened(with_val(data, "--reference", str(store), *more))
    for loss, own in compared.candidates.items():
        run = replace(make_run(loss), setting={"loss": loss, "options": own[0][0]})
        used = compared.task(run).build(CPU).trainer.loss
        words = shlex.split(compared.command_line(asdict(run)))
        trained = resolve(flags.parse(words[2:]))
        if loss == BASELINE:
            assert isinstance(used, OpenClipLoss) and trained.data.reference is None
        else:
            assert (used.reference_dim, used.steers, used.distill) == (7, steers, 0.0 if steers else 0.5)
            assert (trained.data.reference, trained.loss.given["steer"]) == (str(store), steers)


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        ("--lr-min 1e-3 --lr-scheduler cosine", {"lr_min": 5e-4}),
        ("--lr-scheduler const-cooldown --epochs-cooldown 9 --epochs 9", {"cooldown_epochs": 1}),
    ],
)
def test_limits_of_the_schedule_fit_shorter_runs_and_smaller_rates(data, typed, expected):
    compared = opened(with_val(data, *typed.split()))
    words = compared.task(make_run(BASELINE, lr=5e-4)).words
    schedule = resolve(flags.parse([*words])).schedule
    assert {name: getattr(schedule, name) for name in expected} == expected


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_runs_from_other_weights_in_the_same_place_are_not_reused(kind, data):
    weights, more, found = data / "weights.pt", ["--pretrained", str(data / "weights.pt")], []
    if kind == "folder":
        more = ["--model", model_folder(data / "model", VISION)]
        weights = data / "model" / "open_clip_pytorch_model.bin"
    for content in (b"a", b"a", b"b"):
        weights.write_bytes(content)
        found.append(comparison.digest_of_flags(*parse(arguments(data, *more))))
    assert found[0] == found[1] != found[2]
    if kind == "folder":
        config = weights.with_name("open_clip_config.json")
        config.write_text(config.read_text().replace('"embed_dim"', '"quick_gelu": true, "embed_dim"'))
        assert comparison.digest_of_flags(*parse(arguments(data, *more))) != found[2]


@pytest.mark.parametrize(("more", "rate"), [([], 5e-4), (["--pretrained"], 1e-5), (["--pretrained", "--lr"], 3e-4)])
def test_a_pretrained_model_has_the_learning_rates_of_fine_tuning(data, more, rate):
    (data / "start.pt").write_bytes(b"a")
    given = [word for word in arguments(data) if word not in ("--lr", "1e-3")]
    values = {"--pretrained": str(data / "start.pt"), "--lr": "3e-4"}
    _, training = parse([*given, *(word for flag in more for word in (flag, values[flag]))])
    assert training.optimizer.lr == rate


def test_runs_of_a_users_own_loss_in_a_changed_file_are_not_reused(compared, tmp_path, monkeypatch):
    file, found = tmp_path / "own.py", []
    monkeypatch.setitem(sys.modules, "own", SimpleNamespace(__file__=str(file)))
    for content in ("a", "a", "b"):
        file.write_text(content)
        found.append(compared.make_run("own:METHOD", {}, 1.0, {"epochs": 1}).id)
    assert found[0] == found[1] != found[2]


def test_training_images_beyond_the_cache_are_read_from_their_shards(data):
    argv = with_val(data, "--cache", str(50_000 / 2**30))
    assert "decoded again for each run" in prepare(*parse(argv))[1][-1]
    assert execute(opened(argv), make_run("queueclip", 48))["steps"] == 6
