"""Export a checkpoint: ``openclip-ext export RUN/checkpoints/epoch_K.pt --to hf --output DIR``."""

import json
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
from open_clip.constants import HF_CONFIG_NAME, HF_SAFE_WEIGHTS_NAME
from open_clip.push_to_hf_hub import save_config_for_hf
from safetensors import SafetensorError
from safetensors.torch import save_file

from openclip_ext import compat
from openclip_ext.checkpoint.finding import checkpoint_file
from openclip_ext.checkpoint.format import read
from openclip_ext.cli import command_line
from openclip_ext.cli.errors import UsageError
from openclip_ext.evaluation.mixes import WEIGHT_KEY, chosen_mix, mixes, share
from openclip_ext.evaluation.models import open_model, weights_digest
from openclip_ext.evaluation.report.curves import plot
from openclip_ext.evaluation.run_folder import read_config
from openclip_ext.evaluation.training_log import TrainingLog, read_log
from openclip_ext.export.card import CURVES, evaluations, model_card
from openclip_ext.export.clip_model import write_clip_model
from openclip_ext.export.siglip_model import write_siglip_model
from openclip_ext.files.writing import output_path, write_text
from openclip_ext.losses.heads import stored_heads
from openclip_ext.training.config import ModelConfig
from openclip_ext.training.config import model_config as training_model_config
from openclip_ext.training.model import MODEL_CONFIG

FORMATS = {"safetensors": "for OpenCLIP", "hf": "for OpenCLIP and transformers"}


def export(checkpoint: Path, to: str, output: Path, interpolate: float = 1.0) -> None:
    """Write a folder that ``open_clip.create_model_and_transforms("local-dir:FOLDER")`` loads, with a model card.

    Args:
        checkpoint: A file in a run's ``checkpoints/``, or the run folder, which means the newest checkpoint.
        to: A key of :data:`FORMATS`.
        output: A new or empty folder.
        interpolate: Weight α of the trained weights. With α < 1, the exported weights are (1 − α) · initial weights + α ·
            trained weights (WiSE-FT, Wortsman et al. 2022). The initial weights are those of the run's ``--pretrained``.

    Raises:
        UsageError: The checkpoint or run is missing, the folder is not empty, the format does not support the model, or the
            run did not start from pretrained weights.
    """
    checkpoint = checkpoint_file(checkpoint)
    if output.exists() and any(output.iterdir()):
        raise UsageError(f"{output} is not empty: use another --output")
    run = checkpoint.absolute().parent.parent
    if not (run / "config.json").is_file():
        raise UsageError(
            f"{checkpoint} is not in a run folder, which has the model's settings: move it back to LOGS/NAME/checkpoints/"
        )
    config = read_config(run)
    heads = stored_heads(checkpoint)
    if heads is not None and heads["evaluated"]:
        raise UsageError(
            f"{checkpoint} has heads of the kind {heads['kind']!r}, which neither OpenCLIP nor transformers supports: use "
            "another checkpoint"
        )
    loaded = read(checkpoint, needs_state=False)
    settings = training_model_config(config["flags"])
    opened = open_model(checkpoint, settings.name)
    model, tokenizer = opened.model, opened.tokenizer
    _check_loadable(model, settings)
    chosen = loaded.model_file.get(WEIGHT_KEY)
    if interpolate != 1:
        next(mixes(opened, [interpolate]))
    model_config = json.loads((run / MODEL_CONFIG / f"{settings.file_name}.json").read_text())
    output.mkdir(parents=True, exist_ok=True)
    if to == "hf" and getattr(model, "logit_bias", None) is not None:
        write_siglip_model(model, tokenizer, output)
    elif to == "hf":
        write_clip_model(model, model_config, tokenizer, output)
    save_config_for_hf(model, output / HF_CONFIG_NAME, model_config)
    if "hf_tokenizer_name" in model_config["text_cfg"]:
        cast(Any, tokenizer).save_pretrained(output)  # OpenCLIP loads the tokenizer from this folder
    # A file that contains only the model, such as best.pt, stores the number of epochs, but no step.
    unit = "epoch" if loaded.shared is None else "step"
    end = getattr(loaded.position, unit)
    lines = [line for line in read_log(run).steps if line[unit] < end]
    if lines:
        plot({config["flags"]["name"]: [TrainingLog({}, lines)]}, output / CURVES)
    interpolate = interpolate if chosen is None else chosen
    results = evaluations(run, loaded, weights_digest(model)) if interpolate == 1 else {}
    card = model_card(config, loaded, lines[-1] if lines else None, results, to == "hf", interpolate)
    write_text(output / "README.md", card)
    # The weights are written last, so that nothing can load a folder whose other files are incomplete.
    weights = {name: value.contiguous() for name, value in model.state_dict().items()}
    save_file(weights, output / HF_SAFE_WEIGHTS_NAME)
    for path in output.glob("*.safetensors"):  # safetensors ignores the umask: only the owner could read its files
        path.chmod((output / "README.md").stat().st_mode)


def _check_loadable(model: Any, settings: ModelConfig) -> None:
    """Raise UsageError if --force-image-size changes the shapes of a timm tower's weights."""
    if settings.force_image_size is None or not compat.is_timm(model):
        return
    with command_line.without_warnings():
        plain, *_ = replace(settings, force_image_size=None, pretrained=None).create(torch.device("cpu"))
    if any(value.shape != model.state_dict()[name].shape for name, value in plain.state_dict().items()):
        raise UsageError(
            f"--force-image-size {settings.force_image_size}: stock OpenCLIP cannot load a timm tower with another image "
            "size from a folder. Load the model with the code that the run printed"
        )


def main(argv: list[str] | None = None) -> None:
    parser = command_line.Parser(prog="openclip-ext export", description=__doc__, allow_abbrev=False)
    file = "LOGS/NAME/checkpoints/epoch_K.pt, or LOGS/NAME for its newest checkpoint"
    parser.add_argument("checkpoint", type=Path, help=file)
    formats = "; ".join(f"{name}: {purpose}" for name, purpose in FORMATS.items())
    parser.add_argument("--to", choices=FORMATS, default="safetensors", help=f"{formats} (default: %(default)s)")
    parser.add_argument("--output", type=output_path, required=True, help="new or empty folder")
    help = "weight α of the trained weights; below 1, the weights of --pretrained keep the share 1 − α (default: 1)"
    parser.add_argument("--interpolate", type=share, default=1.0, metavar="α", help=help)
    args = parser.parse_args(argv)
    try:
        export(args.checkpoint, args.to, args.output, args.interpolate)
    except SafetensorError as error:  # the disk is full
        raise OSError(f"{args.output} could not be written: {error}") from error
    if args.interpolate == 1 and (better := chosen_mix(checkpoint_file(args.checkpoint), "export")):
        print(better)
    print(f"To publish the folder: hf upload YOU/NAME {shlex.quote(str(args.output))}")
    print(f"{args.output}: open_clip.create_model_and_transforms('local-dir:{args.output}')")


if __name__ == "__main__":
    command_line.run(main)
