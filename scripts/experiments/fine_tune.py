"""Fine-tune a model on icons of styles that it lacks, and score what the mixes of its weights gain and keep.

    python -m scripts.experiments.fine_tune --make emoji --cache CACHE --own emoji-1900  # makes the user's own data
    python -m scripts.experiments.fine_tune --own emoji-1900 --kept icons-11k --start logs/RUN/checkpoints/epoch_16.pt \\
        --results rows.jsonl --runs runs
    python -m scripts.experiments.fine_tune --own ... --kept ... --start ... --results rows.jsonl --table --figure figure.png

The start is a model that was trained on icons (``scripts.experiments.icons``), which have no emoji, such as by::

    openclip-ext train --model demo-resnet --train-data 'icons-11k/train/*.tar' --batch-size 64 --epochs 16 --lr 1e-3 \\
        --warmup 100 --precision fp32 --device cpu --workers 0 --loss openclip --seed 0 --name openclip

``--make`` writes own data: two sets of black emoji (``emoji``), all emoji (``all-emoji``) or the demo set (``demo``). Other
own data, such as those of ``scripts.experiments.clip_arts``, need folders ``train/``, ``val/`` and ``test/`` with shards.
Concepts of emoji are split: a name is in only one of training, validation and test. Kept are the icons in ``val/`` and
``test/``. Rehearsal uses the first 1,000 training pairs of the start, unless a comparison states otherwise. ``--compare``
selects the methods, or changes of single values of the recipe.

Each run is one ``openclip-ext train``. ``PYTHONPATH`` must contain ``examples/other_losses``. The results have a JSON line for
each finished run, with the own and kept R@1 (mean of both directions) of the mixes of start and trained weights. With the
first seed, each method runs at up to four learning rates. The rate with the best validation score (the mean of the table's
three columns) runs with the other seeds. ``test/`` has no influence. Finished runs are skipped, so you can repeat a killed
command.
"""

import argparse
import hashlib
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import open_clip
import torch
from matplotlib.figure import Figure

from openclip_ext.checkpoint.format import load_model_file
from openclip_ext.cli import command_line
from openclip_ext.compare.trials import Results, Run, Trials, read_results
from openclip_ext.data.loader.build import build_eval_loader
from openclip_ext.data.shapes.write import ShapesConfig, write_shards
from openclip_ext.data.sources.spec import DataSpec
from openclip_ext.evaluation.encoder import Encoder
from openclip_ext.files.writing import file_lock, output_path
from openclip_ext.model_configs import add_model_configs
from openclip_ext.pages.charts import PALETTE
from openclip_ext.pages.rendering import markdown_table
from openclip_ext.training import flags
from openclip_ext.training.config import model_config
from openclip_ext.training.interpolation import score_mixes
from openclip_ext.training.validation import KeptValidation, Scheduled, Validation
from scripts.experiments.grid import Contest, data_digest, environment
from scripts.experiments.icons import PACKAGE, Icon, fetch, read_set, take
from scripts.experiments.pairs import Pair, complete_folder, seeded_order, write_dataset
from scripts.experiments.tables import with_interval

_BLACK_EMOJI = ("emojione-monotone", "fluent-emoji-high-contrast")
_COLORED_EMOJI = (
    *("emojione", "emojione-v1", "fluent-emoji", "fluent-emoji-flat", "fxemoji"),
    *("noto", "noto-v1", "openmoji", "streamline-emojis", "twemoji"),
)
# The icon sets of own data, and the number of pairs in each split; a concept's split depends on its place in a seeded order.
OWN: Mapping[str, tuple[Sequence[str], Mapping[str, int]]] = {
    "emoji": (_BLACK_EMOJI, {"train": 1900, "val": 500, "test": 500}),
    "all-emoji": (_BLACK_EMOJI + _COLORED_EMOJI, {"train": 11_000, "val": 500, "test": 500}),
}
DEMO_PAIRS = {"train": 2000, "val": 500, "test": 500}
_VARIANT = "skin-tone"  # names of an emoji's variants, which are left out
RATES, SEEDS = (1e-4, 3e-4, 1e-3, 3e-3), (0, 1, 2)
EPOCHS, BATCH_SIZE, MODEL, REHEARSED_SHARE = 10, 64, "demo-resnet", 0.25
FIRST = {"openclip": "--loss openclip", "queueclip": "--loss queueclip"}
REST = {
    "fastclip": "--loss fastclip",
    "neuclip": "--loss neuclip",
    "siglip": "--loss siglip",
    # Of sentence-transformers, in both directions, which is OpenCLIP's loss at a constant τ of 0.05.
    "CachedMNRL": "--loss other_losses:CACHED_MNRL",
    "openclip, image tower locked": "--loss openclip --lock-image",
    # A ResNet has no layers for adapters.
    "openclip, adapters of the text tower": "--loss openclip --lora-rank 8 --lora-targets text",
}
_FLAGS = "--warmup 0.1 --wd 0.1 --precision fp32 --device cpu --workers 0 --save-frequency 0 --no-before-after"
_CPU = torch.device("cpu")
# Shares of the start's kept score at which methods are compared.
KEPT_SHARES = (0.95, 0.75)
# The scores of a split: for own and kept, for each weight α of the trained weights: R@1, half its 95 % interval, samples.
Curves = Mapping[str, Mapping[str, Sequence[Any]]]


def make_own(package: Path, output: Path, sets: Sequence[str], pairs: Mapping[str, int]) -> None:
    """Write the own data: the sets' icons without variants, with disjoint concepts in the splits."""
    order = seeded_order(0)
    found = [icon for prefix in sets for icon in read_set(package / "json" / f"{prefix}.json")]
    found = sorted((icon for icon in found if _VARIANT not in icon.name), key=lambda icon: order(icon.name))
    concepts = sorted({icon.canonical for icon in found}, key=order)
    pools: dict[str, list[Icon]] = {}
    begin, total = 0, sum(pairs.values())
    for split, number in pairs.items():
        end = begin + len(concepts) * number // total
        chosen = set(concepts[begin:end])
        pools[split], begin = [icon for icon in found if icon.canonical in chosen], end

    with complete_folder(output) as folder, ThreadPoolExecutor() as executor:

        def pairs_of(split: str) -> Iterator[Pair]:
            for icon, png in take(pools[split], pairs[split], 64, executor):
                yield Pair(png, icon.caption, {"set": icon.prefix, "icon": icon.name, "name": icon.canonical})

        recipe = {**pairs, "sets": sets, "package": PACKAGE}
        write_dataset(folder, {split: pairs_of(split) for split in pairs}, concepts, recipe)


def make_demo(output: Path) -> None:
    """Write pairs of the demo set. Validation and test pairs also show shapes in colors that are not in the training pairs."""
    with complete_folder(output) as folder:
        for seed, (split, number) in enumerate(DEMO_PAIRS.items()):
            write_shards(folder / split, ShapesConfig(number, seed, "train" if split == "train" else "test"))
        (folder / "recipe.json").write_text(json.dumps({**DEMO_PAIRS, "data": "demo set"}) + "\n")


@dataclass(frozen=True)
class Methods:
    """The flags of the methods to compare, by name: the ``first`` also with rehearsal. Each runs at the learning ``rates``.

    ``changes`` are changes of the first methods' :class:`Run` and of their flags, by name. They do not run at other rates.
    """

    first: Mapping[str, str]
    rest: Mapping[str, str]
    rates: Sequence[float]
    changes: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


ALL = Methods(FIRST, REST, RATES)
_DISTILLED = " --reference start --no-steer --distill 0.5"
# Changes of single values of the recipe, queueclip with rehearsal.
CHANGES: Mapping[str, Mapping[str, Any]] = {
    "as above": {},
    "5 epochs": {"epochs": 5},
    "20 epochs": {"epochs": 20},
    "batch size 32": {"batch_size": 32},
    "batch size 128": {"batch_size": 128},
    "`--keep-share 0.125`": {"keep_share": 0.125},
    "`--keep-share 0.5`": {"keep_share": 0.5},
    "`--warmup 0`": {"flags": " --warmup 0"},
    "`--warmup 0.3`": {"flags": " --warmup 0.3"},
    "`--wd 0`": {"flags": " --wd 0"},
    "`--wd 0.5`": {"flags": " --wd 0.5"},
    "layer decay 0.8": {"flags": " --image-layer-decay 0.8 --text-layer-decay 0.8"},
    "`--reference start --no-steer --distill 0.5`": {"flags": _DISTILLED},
    "`--equal-captions mask`": {"flags": " --equal-captions mask"},
}
# Parts of fine-tuning that are added to rehearsal.
PARTS: Mapping[str, Mapping[str, Any]] = {
    "rehearsal": {},
    "rehearsal, equal captions masked": {"flags": " --equal-captions mask"},
    "rehearsal, distilled": {"flags": _DISTILLED},
    "all three": {"flags": f" --equal-captions mask{_DISTILLED}"},
    "rehearsal of 10,000 pairs": {"keep_shards": 10},
}
# What can be compared.
COMPARISONS = {
    "methods": ALL,
    "losses": Methods(FIRST, {}, RATES),
    # A start with a small temperature, as released models have: is it better to keep it?
    "temperatures": Methods(
        FIRST | {"queueclip, constant temperature": "--loss queueclip --temperature-scheme constant"}, {}, RATES[:3]
    ),
    # A start that the sigmoid loss has trained: is it better to go on with this loss?
    "siglip": Methods({"siglip": "--loss siglip"} | FIRST, {}, RATES[:3]),
    # Own data with several images of each caption.
    "equal-captions": Methods(
        {name: f"{given} --equal-captions mask" for name, given in FIRST.items()},
        {"openclip, equal captions as negatives": "--loss openclip"},
        RATES[1:],
    ),
    "recipe": Methods({"queueclip": FIRST["queueclip"]}, {}, (1e-3,), CHANGES),
    "parts": Methods(FIRST, {}, (1e-3,), PARTS),
}


def runs_of(
    methods: Mapping[str, str], about: Mapping[str, Any], rates: Sequence[float], share: float = 0.0
) -> dict[str, list[Run]]:
    """Return a run for each learning rate of each method, with rehearsal if ``share`` is not 0."""
    return {
        name + (", rehearsal" if share else ""): [
            Run(**about, lr=lr, seed=SEEDS[0], family=name, setting={"flags": given, "keep_share": share})
            for lr in rates
        ]
        for name, given in methods.items()
    }


def changed(about: Mapping[str, Any], lr: float, method: str, given: str, change: Mapping[str, Any]) -> Run:
    """Return a run with rehearsal, in which one value of the recipe is changed."""
    setting = {"flags": given + change.get("flags", ""), "keep_share": change.get("keep_share", REHEARSED_SHARE)}
    if "keep_shards" in change:
        setting["keep_shards"] = change["keep_shards"]
    run = Run(**about, lr=lr, seed=SEEDS[0], family=method, setting=setting)
    run = replace(run, **{name: change[name] for name in ("epochs", "batch_size") if name in change})
    return replace(run, schedule=f"{run.epochs} epochs")


def contests(about: Mapping[str, Any], results: Results, methods: Methods = ALL) -> Iterator[Contest]:
    """Yield comparisons in the order in which they run. A later one may depend on the results of the earlier ones."""
    if methods.changes:
        families = {
            name if len(methods.first) == 1 else f"{method}, {name}": [
                changed(about, methods.rates[0], method, given, change)
            ]
            for method, given in methods.first.items()
            for name, change in methods.changes.items()
        }
        yield Contest(families, SEEDS)
        return
    first = runs_of(methods.first, about, methods.rates)
    tuned = Contest(first, SEEDS[:1])
    yield tuned
    rehearsed = runs_of(methods.first, about, methods.rates, REHEARSED_SHARE)
    at_best = {
        f"{name}, rehearsal": [replace(run, setting=run.setting | {"keep_share": REHEARSED_SHARE})]
        for name in first
        for run in tuned.best(name, results)
    }
    yield Contest(at_best, SEEDS[:1])
    yield Contest(first | at_best, SEEDS)
    yield Contest(first | rehearsed, SEEDS)
    yield Contest(first | rehearsed | runs_of(methods.rest, about, methods.rates), SEEDS)


def next_run(about: Mapping[str, Any], results: Results, methods: Methods = ALL) -> Run | None:
    """Return the next run of the experiment, or None after the last one."""
    return next((run for contest in contests(about, results, methods) for run in contest.pending(results)), None)


def own_at(curves: Curves, share: float) -> float:
    """Return the own score where the kept score first falls to ``share`` of the start's, linear between the mixes.

    If the kept score never falls so low, return the own score of the trained weights.
    """
    points = [(curves["kept"][weight][0], own[0]) for weight, own in curves["own"].items()]
    needed = share * points[0][0]
    for (kept, own), (next_kept, next_own) in pairwise(points):
        if next_kept < needed:
            return own + (next_own - own) * (kept - needed) / (kept - next_kept)
    return points[-1][1]


def columns(row: Mapping[str, Any], split: str) -> list[float]:
    """Return the own scores in percent at each of ``KEPT_SHARES``, and of the mix with the best own validation score."""
    chosen = row["val"]["own"]
    best = max(chosen, key=lambda weight: chosen[weight][0])
    return [
        100 * value for value in (*(own_at(row[split], share) for share in KEPT_SHARES), row[split]["own"][best][0])
    ]


class Data:
    """The decoded validation and test pairs of own and kept data."""

    def __init__(self, own: Path, kept: Path) -> None:
        self.own, self.kept = own, kept
        *_, transform = open_clip.create_model_and_transforms(MODEL)
        tokenizer = open_clip.get_tokenizer(MODEL)
        encoder = partial(Encoder, transform=transform, tokenizer=tokenizer, device=_CPU)

        def decoded(folder: Path) -> list[Any]:
            spec = DataSpec(f"{folder}/*.tar")
            return list(build_eval_loader(spec, batch_size=500, preprocess=transform, tokenizer=tokenizer))

        self.tasks = {
            split: [
                Scheduled(Validation(decoded(own / split)), 1, encoder),
                Scheduled(KeptValidation(decoded(kept / split)), 1, encoder),
            ]
            for split in ("val", "test")
        }

    def scores(self, argv: list[str], checkpoint: Path) -> dict[str, Any]:
        """Return the scores of the mixes, and the α that the training program's rule chooses on the validation pairs."""
        content, settings = load_model_file(checkpoint), model_config(flags.parse(argv).flags)
        found: dict[str, Any] = {}
        for split, tasks in self.tasks.items():
            mixes = score_mixes(tasks, settings, content, 0.9, _CPU)
            found[split] = {
                "own" if of.is_own else "kept": {f"{weight:g}": list(score) for weight, score in scores.items()}
                for of, scores in mixes.scores.items()
            }
            found.setdefault("chosen", mixes.choice.weight)  # of the first split, which is the validation split
        found["val"]["mean"] = statistics.fmean(columns(found, "val"))
        return found


def train(run: Run, data: Data, start: Path, folder: Path, commit: str) -> dict[str, Any]:
    """Train and score one run; return its row. Raise CalledProcessError if training fails."""
    began = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    shutil.rmtree(folder / run.id, ignore_errors=True)
    argv = ["--model", MODEL, "--pretrained", str(start), "--train-data", f"{data.own}/train/*.tar", *_FLAGS.split()]
    argv += ["--logs", str(folder), "--name", run.id, "--batch-size", str(run.batch_size), "--epochs", str(run.epochs)]
    argv += ["--lr", str(run.lr), "--seed", str(run.seed), *run.setting["flags"].split()]
    if share := run.setting["keep_share"]:
        shards = f"{{00000..{run.setting.get('keep_shards', 1) - 1:05}}}.tar"  # of 1,000 pairs
        argv += ["--keep-data", f"{data.kept}/train/{shards}", "--keep-share", str(share), "--val-frequency", "0"]
    subprocess.run([sys.executable, "-m", "openclip_ext", "train", *argv], check=True)
    trained = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    scores = data.scores(argv, folder / run.id / "checkpoints" / f"epoch_{run.epochs}.pt")
    shutil.rmtree(folder / run.id)
    seconds, cpu_seconds = (round(after - before, 1) for after, before in zip(trained, began, strict=True))
    about = {"commit": commit, "start": start.parents[1].name, "own": data.own.name, "flags": _FLAGS}
    about |= {"seconds": seconds, "cpu_seconds": cpu_seconds, "environment": environment()}
    return {"id": run.id, **asdict(run), **scores, **about}


def run_all(about: Mapping[str, Any], args: argparse.Namespace, methods: Methods) -> list[str]:
    """Execute all runs, or the first ``args.most``; return the errors of failed runs."""
    commit = args.commit or subprocess.check_output(["git", "rev-parse", "HEAD"], text=True).strip()
    results = Trials(args.results)
    data = None
    while (run := next_run(about, results.known, methods)) is not None and len(results.done) < args.most:
        data = data or Data(args.own, args.kept)
        print(
            f"{len(results.done)} rows. Next: {run.family}, {run.setting}, lr {run.lr:g}, seed {run.seed}", flush=True
        )
        try:
            row = train(run, data, args.start, args.runs, commit)
        except subprocess.CalledProcessError as error:
            results.keep(run.id, None, str(error))
        else:
            results.keep(run.id, row)
    return [row["failed"] for row in results.failed.values()]


def best_rows(
    about: Mapping[str, Any], results: Results, methods: Methods = ALL
) -> Iterator[tuple[str, int, dict[int, Mapping[str, Any]]]]:
    """Yield each method with its number of rates, and the rows of its best rate by seed."""
    *_, contest = contests(about, results, methods)
    for name, runs in contest.families.items():
        tried = [run for run in runs if run.id in results]
        if tried:
            best = max(tried, key=lambda run: results[run.id]["val"]["mean"])
            ids = {seed: replace(best, seed=seed).id for seed in contest.seeds}
            yield name, len(tried), {seed: results[one] for seed, one in ids.items() if one in results}


def table(about: Mapping[str, Any], results: Results, methods: Methods = ALL) -> str:
    """Return the own test scores of each method, and the paired differences from the first method."""
    heads = [f"own at {share:.0%} kept" for share in KEPT_SHARES]
    cells = [["method", "rates", "lr", "seeds", *heads, "own, unconstrained"]]
    base: dict[int, list[float]] = {}
    for name, rates, rows in best_rows(about, results, methods):
        found = {seed: columns(row, "test") for seed, row in rows.items()}
        base = base or found
        line = [name, str(rates), f"{next(iter(rows.values()))['lr']:g}", str(len(found))]
        for place in range(len(heads) + 1):
            line.append(f"{statistics.fmean(values[place] for values in found.values()):.1f}")
            paired = [values[place] - base[seed][place] for seed, values in found.items() if seed in base]
            if paired and found is not base:
                line[-1] += f", {with_interval(paired, bold=True)}"
        cells.append(line)
    return markdown_table(cells)


def lead(about: Mapping[str, Any], results: Results, methods: Methods = ALL) -> list[str]:
    """Return own test scores at 75 % kept: openclip, with rehearsal openclip and queueclip, and queueclip's lead there."""
    place = KEPT_SHARES.index(0.75)
    found = {
        name: {seed: columns(row, "test")[place] for seed, row in rows.items()}
        for name, _, rows in best_rows(about, results, methods)
    }
    compared = [found[name] for name in ("openclip", "openclip, rehearsal", "queueclip, rehearsal")]
    _, base, ours = compared
    means = [f"{statistics.fmean(values.values()):.1f}" for values in compared]
    return [*means, with_interval([ours[seed] - base[seed] for seed in ours], bold=True)]


def draw(about: Mapping[str, Any], results: Results, path: Path, methods: Methods = ALL) -> None:
    """Draw own against kept R@1 on the test pairs: a line for each method, a point for each mix, means over the seeds."""
    figure = Figure(figsize=(9, 4), dpi=160, layout="constrained")
    axes = figure.subplots()
    for number, (name, _, rows) in enumerate(best_rows(about, results, methods)):
        scores = [row["test"] for row in rows.values()]
        kept, own = (
            [100 * statistics.fmean(of[kind][alpha][0] for of in scores) for alpha in scores[0][kind]]
            for kind in ("kept", "own")
        )
        seeds = f"{len(rows)} seed{'s' * (len(rows) > 1)}"
        style = "o-" if number < len(PALETTE) else "o--"  # where the colors repeat
        color = PALETTE[number % len(PALETTE)]
        axes.plot(kept, own, style, color=color, markersize=3, label=f"{name} ({seeds})")
    axes.set_xlabel("kept: R@1 on the start's test icons, percent")
    axes.set_ylabel("own: R@1 on the own test pairs, percent")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1.01, 0.5))
    figure.savefig(path, metadata={"Software": None})


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--own", type=Path, required=True, help="folder of the own data")
    parser.add_argument("--make", choices=(*OWN, "demo"), help="write this own data to the folder --own, and stop")
    parser.add_argument("--cache", type=Path, help="folder for the icons' collection, with --make of emoji")
    parser.add_argument("--kept", type=Path, help="folder from scripts.experiments.icons")
    parser.add_argument("--start", type=Path, help="checkpoint LOGS/NAME/checkpoints/epoch_K.pt of the start")
    parser.add_argument("--results", type=output_path, help="JSON lines file to which finished runs are added")
    parser.add_argument("--runs", type=output_path, default=Path("runs"), help="folder of unfinished runs")
    parser.add_argument("--commit", help="commit of the code, if the folder is no repository")
    parser.add_argument("--most", type=int, default=sys.maxsize, help="stop when the file has so many rows")
    parser.add_argument("--compare", choices=COMPARISONS, default="methods", help="what to compare (default: methods)")
    parser.add_argument("--table", action="store_true", help="print the table of the finished runs, and stop")
    parser.add_argument("--figure", type=output_path, help="with --table: PNG file of own against kept scores")
    args = parser.parse_args(argv)
    if args.make == "demo":
        make_demo(args.own)
        return
    if args.make is not None:
        if args.cache is None:
            parser.error("--make of emoji needs --cache")
        make_own(fetch(args.cache), args.own, *OWN[args.make])
        return
    if None in (args.kept, args.start, args.results):
        parser.error("give --kept, --start and --results")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    torch.set_num_threads(1)
    add_model_configs()
    digests = [data_digest(args.own), data_digest(args.kept), hashlib.sha256(args.start.read_bytes()).hexdigest()[:12]]
    about = {"data": ", ".join(digests), "model": MODEL, "schedule": f"{EPOCHS} epochs"}
    about |= {"batch_size": BATCH_SIZE, "epochs": EPOCHS}
    methods = COMPARISONS[args.compare]
    if args.table:
        print(table(about, read_results(args.results), methods))
        if args.figure:
            draw(about, read_results(args.results), args.figure, methods)
        return
    with file_lock(args.results.parent, f".{args.results.name}.lock"):
        failures = run_all(about, args, methods)
    if failures:
        sys.exit(f"{len(failures)} runs failed. Repeat the command to run them again")


if __name__ == "__main__":
    command_line.run(main)
