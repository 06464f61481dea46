"""Load the model, the loss and the training data of a finished run from its folder."""

import argparse
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from openclip_ext import compat
from openclip_ext.checkpoint.finding import scan
from openclip_ext.checkpoint.format import Checkpoint, checksum, read, verify
from openclip_ext.cli import command_line
from openclip_ext.cli.errors import UsageError
from openclip_ext.cli.messages import MASK
from openclip_ext.cli.options import from_flags
from openclip_ext.contrastive.loss import ContrastiveLoss
from openclip_ext.data.loader.build import build_source
from openclip_ext.data.loader.eval_loader import EvalLoader
from openclip_ext.data.sources.source import Source
from openclip_ext.data.sources.spec import DataSpec
from openclip_ext.evaluation.encoder import TABLES, Embeddings, Encoder, tables
from openclip_ext.evaluation.models import open_model
from openclip_ext.evaluation.run_folder import read_config
from openclip_ext.files.writing import write_text
from openclip_ext.losses import registry
from openclip_ext.training.checkpoint.restoring import load_model, restore_loss, unmerged
from openclip_ext.training.config import model_config
from openclip_ext.training.ema import TRAINED_KEY
from openclip_ext.training.lora import add_adapters

# File with the origin of the embeddings of :func:`embed_training_set`.
ABOUT = "embeddings.json"


@dataclass(frozen=True)
class FinishedRun:
    """The model and loss of a checkpoint in evaluation mode, and the run's training data with the evaluation transform."""

    folder: Path
    checkpoint: Path
    step: int
    samples_seen: int
    loss_name: str
    loss: ContrastiveLoss
    encoder: Encoder
    source: Source
    loader: EvalLoader
    embed_dim: int
    global_batch: int
    device: torch.device


def add_run_arguments(parser: argparse.ArgumentParser, several: bool = False) -> None:
    """Add the command-line arguments of :func:`load_run`. If ``several``, the user can give more than one run."""
    count, others = ("+", "; or several names, separated by commas, or all") if several else (None, "")
    parser.add_argument("run", nargs=count, type=Path, metavar="RUN_FOLDER", help="LOGS/NAME of a training run")
    names = f"file in checkpoints/, or latest{others} (default: %(default)s)"
    parser.add_argument("--checkpoint", default="latest", help=names)
    parser.add_argument("--train-data", help="new path of the training data, if the data have moved")
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", type=command_line.device, default=default, help="default: cuda if there is a GPU")
    workers_help = "number of processes that read images (default: as in training)"
    parser.add_argument("--workers", type=command_line.count_or_zero, help=workers_help)
    parser.add_argument(
        "--batch-size", type=command_line.count, help="number of images per batch (default: as in training)"
    )


def load_run(
    run: Path,
    checkpoint: str = "latest",
    device: torch.device | str = "cpu",
    train_data: str | None = None,
    workers: int | None = None,
    batch_size: int | None = None,
    **others: Any,
) -> FinishedRun:
    """Load a run from its folder. :func:`add_run_arguments` explains the arguments; ``others`` are ignored.

    The loss's state belongs to the trained weights, so the model has these, not their average (``--model-ema-decay``).

    Raises:
        UsageError: The run, the checkpoint, its state or the training data are missing, or the data have changed.
    """
    device = torch.device(device)
    config = read_config(run)
    loaded = _read_checkpoint(run / "checkpoints", checkpoint)
    flags = config["flags"]
    if flags.get("keep_data"):
        raise UsageError(f"{run} was trained with --keep-data, which this program does not support: use another run")
    settings = model_config(flags)
    opened = open_model(loaded.path, settings.name, precision=settings.precision, heads=False)
    model: Any = opened.model
    if TRAINED_KEY in loaded.model_file:
        if settings.lora.rank is not None:
            add_adapters(model, settings.lora, weights=None)
        load_model(model, unmerged(loaded, model)[TRAINED_KEY], loaded.path)
        model.eval()
    assert loaded.shared is not None  # _read_checkpoint rejects checkpoints without shared state
    identity = loaded.shared["identity"]
    source = _training_data(from_flags(DataSpec, flags), train_data, opened.transform, identity)
    loader = EvalLoader(
        source,
        preprocess=opened.transform,
        tokenizer=opened.tokenizer,
        batch_size=batch_size or flags["batch_size"],
        workers=flags["workers"] if workers is None else workers,
    )
    width = compat.embedding_dim(settings.name, model)
    name, options = config["loss"]["name"], config["loss"]["options"]
    wide = None if source.reference is None else source.reference.width
    loss = registry.create_loss(name, embed_dim=width, num_samples=source.num_samples, reference_dim=wide, **options)
    restore_loss(loaded, loss)
    return FinishedRun(
        folder=run,
        checkpoint=loaded.path,
        step=loaded.position.step,
        samples_seen=loaded.position.samples,
        loss_name=name,
        loss=loss.to(device).eval(),
        encoder=Encoder(model.to(device), opened.transform, opened.tokenizer, device, settings.precision),
        source=source,
        loader=loader,
        embed_dim=width,
        global_batch=identity["global_batch"],
        device=device,
    )


def load_public(
    model: str | None,
    pretrained: str,
    spec: DataSpec,
    folder: Path,
    device: torch.device | str = "cpu",
    workers: int | None = None,
    batch_size: int | None = None,
) -> FinishedRun:
    """Return a model that has not been trained on the data, as if it were a run with OpenCLIP's loss.

    Args:
        model, pretrained: Arguments of ``open_model``.
        spec: The data.
        folder: Folder for results.
        device, workers, batch_size: See :func:`add_run_arguments`.
    """
    device, batch_size = torch.device(device), batch_size or 128
    opened = open_model(pretrained, model, heads=False)
    source = build_source(spec)
    loader = EvalLoader(
        source,
        preprocess=opened.transform,
        tokenizer=opened.tokenizer,
        batch_size=batch_size,
        workers=2 if workers is None else workers,
    )
    with torch.no_grad():
        width = opened.model.encode_text(opened.tokenizer(["a"])).shape[-1]
    loss = registry.create_loss("openclip", embed_dim=width, num_samples=source.num_samples)
    return FinishedRun(
        folder=folder,
        checkpoint=Path(f"{opened.name}-{opened.weights_sha256[:16]}"),
        step=0,
        samples_seen=0,
        loss_name="openclip",
        loss=loss.to(device).eval(),
        encoder=opened.encoder(device, autocast="fp32"),
        source=source,
        loader=loader,
        embed_dim=width,
        global_batch=batch_size,
        device=device,
    )


def _training_data(spec: DataSpec, moved_to: str | None, preprocess: Any, identity: Mapping[str, Any]) -> Source:
    """Return a run's training data. Raise UsageError if the data are missing, or if they are not the run's data."""
    fix = "give the run's training data with --train-data"
    if moved_to is not None:
        # Keep the run's manifest if possible, because it contains the list of excluded samples.
        has_manifest = spec.manifest is not None and Path(spec.manifest).is_file()
        spec = replace(spec, source=moved_to, manifest=spec.manifest if has_manifest else None)
    elif MASK in str(spec.source):
        raise UsageError(f"the run does not store the secrets in {spec.source}: give the full URL with --train-data")
    try:
        source = build_source(spec)
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot read the run's training data: {error}. If the data have moved, {fix}") from error
    expected, found = identity["num_samples"], source.num_samples
    if found != expected:
        raise UsageError(f"{spec.source}: expected the run's {expected:,} samples, found {found:,}: {fix}")
    if None not in (digests := {identity.get("data"), source.index_digest}) and len(digests) > 1:
        raise UsageError(f"{spec.source} is not the run's training data: {fix}")
    return source


def embed_training_set(run: FinishedRun, folder: Path | None = None) -> Embeddings:
    """Embed the training set without augmentation, in the run's precision.

    The embeddings are stored in host memory, or in memory-mapped files in ``folder``. A later call with the same checkpoint
    and data reuses these files.
    """
    batches = math.ceil(run.source.num_kept / run.loader.batch_size)
    progress = command_line.progress_bar(run.loader, desc="embedding", unit="batch", total=batches)
    if folder is None:
        return run.encoder.embed(progress, run.source.num_samples)
    shape = [run.source.num_samples, run.embed_dim]
    # The name of a public model contains a digest of its weights.
    model = checksum(run.checkpoint) if run.checkpoint.is_file() else run.checkpoint.name
    of = {"model": model, "data": run.source.digest, "shape": shape}
    about_file = folder / ABOUT
    about = json.loads(about_file.read_text()) if about_file.is_file() else {}
    if about.get("of") == of and all((folder / name).is_file() for name in TABLES):
        image, text, index = (table[: about["rows"]] for table in tables(folder, *shape))
        return Embeddings(image, text, index, about["logit_scale"])
    folder.mkdir(parents=True, exist_ok=True)
    about_file.unlink(missing_ok=True)
    embeddings = run.encoder.embed(progress, run.source.num_samples, folder)
    about = {"of": of, "rows": len(embeddings.index), "logit_scale": embeddings.logit_scale}
    write_text(about_file, json.dumps(about))
    return embeddings


def _read_checkpoint(folder: Path, name: str) -> Checkpoint:
    path = scan(folder)[0] if name == "latest" else folder / name
    if path is None or not path.is_file():
        found = ", ".join(sorted(file.name for file in folder.glob("*.pt"))) or "none"
        raise UsageError(f"no checkpoint {name} in {folder}; found: {found}")
    if name != "latest":
        verify(path)
    loaded = read(path)
    if loaded.shared is None:
        raise UsageError(
            f"{path} has no state of a loss: give a checkpoint of openclip-ext train with its .state folder"
        )
    return loaded
