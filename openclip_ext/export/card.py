"""Write the model card of an exported checkpoint from the files in its run folder."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from openclip_ext.checkpoint.format import Checkpoint
from openclip_ext.evaluation.results import RESULTS_FILE, has_other_size, read_results
from openclip_ext.evaluation.run_folder import label_of
from openclip_ext.files import json_lines
from openclip_ext.training.config import model_config

CURVES = "curves.png"
_LOGGED = ("loss", "infonce", "chance", "temperature")
_FLAGS = ("epochs", "lr", "wd", "warmup", "lr_scheduler", "opt", "precision", "recipe", "pretrained")
_USAGE = """\
import open_clip

model, _, preprocess = open_clip.create_model_and_transforms("local-dir:FOLDER")
tokenizer = open_clip.get_tokenizer("local-dir:FOLDER")
"""
_TRANSFORMERS_USAGE = """
from transformers import AutoModel, AutoProcessor

model = AutoModel.from_pretrained("FOLDER")
processor = AutoProcessor.from_pretrained("FOLDER")
inputs = processor(text=["a cat"], images=image, padding="max_length", return_tensors="pt")
"""


def model_card(
    config: Mapping[str, Any],
    checkpoint: Checkpoint,
    logged: Mapping[str, Any] | None,
    results: Mapping[str, float],
    with_transformers: bool,
    interpolate: float = 1.0,
) -> str:
    """Return the card as Markdown. It contains no paths of this machine.

    Args:
        config: The run's settings from ``config.json``, see :func:`~openclip_ext.evaluation.run_folder.read_config`.
        logged: The last line of ``metrics.jsonl`` before the checkpoint. None means no such line, and no figure of curves.
        results: Evaluation results of the checkpoint, by metric.
        with_transformers: Whether the folder contains a model of ``transformers``.
        interpolate: Weight of the trained weights; the rest are the initial weights.
    """
    flags, loss = config["flags"], config["loss"]
    identity = {} if checkpoint.shared is None else checkpoint.shared["identity"]
    with_general = " (with those of --keep-data)" if flags.get("keep_data") else ""
    facts: dict[str, Any] = {
        "architecture": model_config(flags).file_name,
        "checkpoint": checkpoint.path.name,
        "weight of the trained weights in the interpolation": None if interpolate == 1 else interpolate,
        f"samples in the data set{with_general}": identity.get("num_samples"),  # including excluded samples
        "global batch": identity.get("global_batch"),
        "completed epochs": checkpoint.position.epoch,
        "optimizer steps": None if checkpoint.shared is None else checkpoint.position.step,
        "loss": loss["name"],
        **{f"loss: {name}": _without_folder(value) for name, value in sorted(loss["options"].items())},
        **{name: _without_folder(flags.get(name)) for name in _FLAGS},
        **config["versions"],
    }
    library = "transformers" if with_transformers else "open_clip"
    tags = "".join(f"\n- {tag}" for tag in ("clip", "open_clip", "openclip_ext"))
    sections = [
        f"---\nlibrary_name: {library}\npipeline_tag: zero-shot-image-classification\ntags:{tags}\n---",
        f"# {facts['architecture']} trained with {loss['name']}",
        "Trained with openclip_ext. Please describe the training data, the intended use and the license here.",
        "## Use\n\n```python\n" + _USAGE + (_TRANSFORMERS_USAGE if with_transformers else "") + "```",
        "## Training\n\n" + _table(facts.items()),
    ]
    if logged:
        values = ((name, f"{logged[name]:.4g}") for name in _LOGGED if logged.get(name) is not None)
        sections += [f"At optimizer step {logged['step'] + 1}:\n\n{_table(values)}", f"![curves of the run]({CURVES})"]
    if results:
        sections.append("## Evaluation\n\n" + _table((name, f"{value:.4g}") for name, value in results.items()))
    return "\n\n".join(sections) + "\n"


def evaluations(folder: Path, checkpoint: Checkpoint, weights: str) -> dict[str, float]:
    """Return a checkpoint's results from the evaluation during training, and from ``openclip-ext evaluate``.

    Results of ``openclip-ext evaluate`` are omitted if the checkpoint has changed since (``weights`` is the SHA-256 of its
    weights), or if the model's options differed from the run's.
    """
    found: dict[str, float] = {}
    position = checkpoint.position
    for line in json_lines.read(folder / "checkpoints" / "results.jsonl"):
        if position.step_in_epoch == 0 and line.get("epoch") == position.epoch:
            numbers = {name: value for name, value in line.items() if isinstance(value, int | float)}
            found |= {name: value for name, value in numbers.items() if name not in ("epoch", "num_samples")}
    for line in read_results(folder / "datacomp" / label_of(checkpoint.path) / RESULTS_FILE):
        score, run = line["metrics"].get("main_metric"), line.get("run", {})
        if score is not None and run.get("weights") == weights and "options" not in run:
            found[line["dataset"] + (" (not DataComp's size)" if has_other_size(line) else "")] = score
    return found


def _without_folder(value: Any) -> Any:
    """Return a value. If it is a path on this machine, shorten the path to its last part; a prefix ``local-dir:`` stays."""
    if not isinstance(value, str):
        return value
    path = value.removeprefix("local-dir:")
    is_path = path != value or path.startswith(("/", "~", ".")) or Path(path).exists()
    return value[: len(value) - len(path)] + Path(path).name if is_path else value


def _table(rows: Any) -> str:
    lines = [f"| {name} | {value} |" for name, value in rows if value not in (None, "")]
    return "\n".join(["| | |", "|---|---|", *lines])
