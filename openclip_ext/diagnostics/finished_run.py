"""Load the model, the loss and the training data of a finished run from its folder, and embed the data."""

import argparse
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from openclip_ext import compat
from openclip_ext.checkpoint.finding import checkpoint_file
from openclip_ext.checkpoint.format import TRAINED_KEY, checksum, read
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
from openclip_ext.training.lora import add_adapters

# File with the origin of the embeddings of :func:`embed_training_set`.
ABOUT = "embeddings.json"


@dataclass(frozen=True)
class FinishedRun:
    """The model and loss of a checkpoint in evaluation mode, and the run's training data."""

    folder: Path
    checkpoint: Path
    loss_name: str
    loss: ContrastiveLoss
    encoder: Encoder
    source: Source
    global_batch: int
    step: int = 0
    samples_seen: int = 0


def add_run_arguments(parser: argparse.ArgumentParser, several: bool = False) -> None:
    """Add the command-line arguments of :func:`load_run`. If ``several``, the user can give more than one run."""
    count, others = ("+", "; or several names, separated by commas, or all") if several else (None, "")
    parser.add_argument("run", nargs=count, type=Path, metavar="RUN_FOLDER", help="LOGS/NAME of a training run")
    names = f"file in checkpoints/, or latest{others} (default: %(default)s)"
    parser.add_argument("--checkpoint", default="latest", help=names)
    parser.add_argument("--train-data", help="new path of the training data, if the data have moved")
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", type=command_line.device, default=default, help="default: cuda if there is a GPU")
    for name, kind, text in (
        ("--workers", command_line.count_or_zero, "number of processes that read images"),
        ("--batch-size", command_line.count, "number of images per batch"),
    ):
        parser.add_argument(name, type=kind, help=f"{text} (default: as in training)")


def load_run(
    run: Path,
    checkpoint: str = "latest",
    train_data: str | None = None,
    device: str = "cpu",
    workers: int | None = None,
    batch_size: int | None = None,
) -> FinishedRun:
    """Load a run from its folder. :func:`add_run_arguments` explains the arguments.

    The loss's state belongs to the trained weights, so the model has these, not their average (``--model-ema-decay``).

    Raises:
        UsageError: The run, the checkpoint, its state or the training data are missing, or the data have changed.
    """
    config = read_config(run)
    flags, name = config["flags"], config["loss"]["name"]
    if flags.get("keep_data"):
        raise UsageError(
            f"{run} was trained with --keep-data, so its data sets cannot be read together. To inspect one: openclip-ext "
            f"inspect DATA --model {flags['model']} --pretrained CHECKPOINT --output FOLDER"
        )
    found = read(checkpoint_file(run if checkpoint == "latest" else run / "checkpoints" / checkpoint))
    if found.shared is None:
        raise UsageError(
            f"{found.path} has no state of a loss: give a checkpoint of openclip-ext train with its .state folder"
        )
    identity, settings = found.shared["identity"], model_config(flags)
    opened = open_model(found.path, settings.name, precision=settings.precision, heads=False)
    model: Any = opened.model
    if TRAINED_KEY in found.model_file:
        if settings.lora.rank is not None:
            add_adapters(model, settings.lora, weights=None)
        load_model(model, unmerged(found, model)[TRAINED_KEY], found.path)
    model.eval()
    encoder = opened.encoder(
        device,
        autocast=settings.precision,
        batch_size=batch_size or flags["batch_size"],
        workers=flags["workers"] if workers is None else workers,
    )
    source = _training_data(from_flags(DataSpec, flags), train_data, identity)
    sizes = {"embed_dim": compat.embedding_dim(settings.name, model), "num_samples": source.num_samples}
    wide = None if source.reference is None else source.reference.width
    loss = registry.create_loss(name, **sizes, reference_dim=wide, **config["loss"]["options"])
    restore_loss(found, loss)
    return FinishedRun(
        folder=run,
        checkpoint=found.path,
        loss_name=name,
        loss=loss.to(encoder.device).eval(),
        encoder=encoder,
        source=source,
        global_batch=identity["global_batch"],
        step=found.position.step,
        samples_seen=found.position.samples,
    )


def load_public(
    model: str | None,
    pretrained: str | None,
    spec: DataSpec,
    folder: Path,
    device: str = "cpu",
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
    opened = open_model(pretrained, model, heads=False)
    encoder = opened.encoder(device, batch_size=batch_size or 128, workers=2 if workers is None else workers)
    name = Path(f"{opened.name}-{opened.weights_sha256[:16]}")
    loss = registry.create_loss("openclip").to(encoder.device).eval()
    return FinishedRun(folder, name, "openclip", loss, encoder, build_source(spec), encoder.batch_size)


def _training_data(spec: DataSpec, moved_to: str | None, identity: Mapping[str, Any]) -> Source:
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
    and data reuses these files. Raise UsageError if ``folder`` contains embeddings of ``openclip-ext embed``.
    """
    # The name of a public model contains a digest of its weights.
    model = checksum(run.checkpoint) if run.checkpoint.is_file() else run.checkpoint.name
    of = {"model": model, "data": run.source.digest}
    if folder is not None and (stored := _stored(folder, of)) is not None:
        return stored
    encoder = run.encoder
    parts: dict[str, Any] = {"preprocess": encoder.transform, "tokenizer": encoder.tokenizer}
    loader = EvalLoader(run.source, **parts, batch_size=encoder.batch_size, workers=encoder.workers)
    batches = math.ceil(run.source.num_kept / encoder.batch_size)
    progress = command_line.progress_bar(loader, desc="embedding", unit="batch", total=batches)
    if folder is None:
        return encoder.embed(progress, run.source.num_samples)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / ABOUT).unlink(missing_ok=True)
    embeddings = encoder.embed(progress, run.source.num_samples, folder)
    shape = [run.source.num_samples, embeddings.image.shape[1]]
    sizes = {"shape": shape, "rows": len(embeddings.index), "logit_scale": embeddings.logit_scale}
    write_text(folder / ABOUT, json.dumps({"of": of} | sizes))
    return embeddings


def _stored(folder: Path, of: dict[str, str]) -> Embeddings | None:
    if not (folder / ABOUT).is_file():
        return None
    about = json.loads((folder / ABOUT).read_text())
    if "of" not in about:
        raise UsageError(f"--output {folder} contains embeddings of openclip-ext embed: give another folder")
    if about["of"] != of or not all((folder / name).is_file() for name in TABLES):
        return None
    image, text, index = (table[: about["rows"]] for table in tables(folder, *about["shape"]))
    return Embeddings(image, text, index, about["logit_scale"])
