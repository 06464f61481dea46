"""Write the unit embeddings of a data set in the order of sample indices, for ``--reference``: ``openclip-ext embed``."""

import argparse
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from openclip_ext import distributed
from openclip_ext.cli import command_line
from openclip_ext.cli.errors import UsageError
from openclip_ext.cli.messages import echo, without_secrets
from openclip_ext.cli.options import OptionError, check_flags, from_flags, own_options, with_flags
from openclip_ext.data.loader.build import build_source
from openclip_ext.data.loader.eval_loader import EvalLoader
from openclip_ext.data.loader.workers import WorkerError
from openclip_ext.data.shards.shardlist import shard_name
from openclip_ext.data.sources.source import Source
from openclip_ext.data.sources.spec import DataSpec
from openclip_ext.evaluation import command_line as shared
from openclip_ext.evaluation.embedding_folder import KEY_COLUMNS, Done, EmbeddingFolder
from openclip_ext.evaluation.encoder import Encoder
from openclip_ext.evaluation.models import data_flags, flags_of_ref, open_model
from openclip_ext.evaluation.results import config_digest
from openclip_ext.files.writing import output_path

# Number of samples per block in a data set without shards.
_BLOCK = 2**16


def main(argv: Sequence[str] | None = None) -> None:
    """Embed a data set, or continue an interrupted run of the same command; raise ValueError or OSError for wrong input."""
    args = _parse_arguments(argv)
    with shared.process_group():
        try:
            _embed(args)
        except WorkerError as error:
            raise UsageError(
                f"a data worker was killed or does not answer ({error}). Run the same command again to continue"
            ) from error


def _embed(args: argparse.Namespace) -> None:
    device, spec = shared.own_device(args.device), from_flags(DataSpec, vars(args))
    if args.precision == "amp" and device.type != "cuda":
        raise UsageError(f"--precision amp needs CUDA, found {device}. Give --precision fp32")
    opened = open_model(args.checkpoint, args.model, args.model_config, **shared.model_options(args))
    encoder = opened.encoder(device, autocast=args.precision, batch_size=args.batch_size, workers=args.workers)
    source = build_source(spec)
    of_model = {
        "model": opened.name,
        "pretrained": opened.checkpoint,
        "weights": opened.weights_sha256,
        "config": config_digest(opened.config),
        "preprocess": opened.config["preprocess"],
    }
    write_embeddings(encoder, source, spec, args.output, of_model)


def write_embeddings(
    encoder: Encoder,
    source: Source,
    spec: DataSpec,
    output: Path,
    of_model: Mapping[str, Any],
    flag: str = "--output",
) -> None:
    """Write the embeddings of all samples of a source to a folder, or the missing ones. Collective: all ranks call it.

    Args:
        encoder: The model, in evaluation mode.
        spec: The specification of the source.
        of_model: What identifies the model and its preprocessing: ``model``, ``pretrained``, ``weights``, ``config`` and
            ``preprocess``.
        flag: The flag that set ``output``, for messages.

    Raises:
        UsageError: The folder has different embeddings, or too many samples are unreadable.
    """
    _refuse_bad(spec, source, *source.known_bad())
    folder = EmbeddingFolder(output, _about(encoder, source, spec, of_model), flag)
    is_rank0 = distributed.is_rank0()
    with folder.begun() as done:
        if done is None:
            if is_rank0:
                echo(f"{output} is finished already")
            return
        units = _units(source, encoder.workers, done)[distributed.rank() :: distributed.world_size()]
        before, bad = sum(entry.bad for entry in done), 0
        shown: dict[str, Any] = {"desc": "embedding", "unit": "sample", "disable": not is_rank0}
        with command_line.progress_bar(total=sum(map(len, units)), **shown) as bar:
            for unit in units:
                loader = EvalLoader(
                    source,
                    preprocess=encoder.transform,
                    tokenizer=encoder.tokenizer,
                    batch_size=encoder.batch_size,
                    workers=encoder.workers,
                    span=unit,
                    names=True,
                )
                names: dict[int, dict[str, Any]] = {}
                unread = len(unit) - folder.write(_rows(encoder.embed_pairs(loader), bar, source, names))
                folder.write_names(unit.start, (names[index] for index in sorted(names)))
                bar.update(unread)
                folder.note(Done(unit.start, unit.stop, unread))
                bad += unread
                _refuse_bad(
                    spec, source, before + bad, f"the last one is in or before {source.group_of(unit.stop - 1)[0]}"
                )
        bad = before + sum(distributed.all_gather_object(bad))
        _refuse_bad(spec, source, bad, "in total over all processes")
        if is_rank0:
            folder.finish(bad)
            echo(f"{source.num_samples:,} samples in {output}; {bad:,} are unreadable and have rows of zeros")


def _rows(
    embedded: Iterable[Any], bar: tqdm, source: Source, names: dict[int, dict[str, Any]]
) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Yield the indices of each batch and the float16 embeddings of its images and texts; add the samples' ``names``."""
    for batch, *embeddings, _ in embedded:
        images, texts = (values.half().cpu().numpy() for values in embeddings)
        if not (np.isfinite(images).all() and np.isfinite(texts).all()):
            raise UsageError("the model returns non-finite embeddings: its weights are broken or overflow")
        for index, *texts_of in zip(batch["index"].tolist(), batch["key"], batch["caption"], strict=True):
            values = (index, shard_name(source.group_of(index)[0]), *texts_of)
            names[index] = dict(zip(KEY_COLUMNS, values, strict=True))
        yield batch["index"].numpy(), images, texts
        bar.update(len(images))


def _units(source: Source, workers: int, done: Sequence[Done]) -> list[range]:
    """Split the unfinished samples into ranges: up to ``workers`` consecutive shards, or one block if there are no shards.

    After a restart with the same shards, workers and ranks, the ranges of unfinished samples are the same.
    """
    shards, end, size = [], 0, 1
    while end < source.num_samples:
        begin, end = end, min(end + _BLOCK, source.num_samples)
        if source.sequential:
            end = begin + source.group_of(begin)[2]
        shards.append(range(begin, end))
    if source.sequential:
        size = max(1, min(workers, -(-len(shards) // distributed.world_size())))
    begins = np.array([shard.start for shard in shards])
    is_done = np.zeros(len(shards), dtype=bool)
    for entry in done:
        is_done |= (entry.begin <= begins) & (begins < entry.end)
    units: list[list[range]] = []
    for number in np.flatnonzero(~is_done).tolist():
        if not units or len(units[-1]) == size or units[-1][-1].stop != shards[number].start:
            units.append([])
        units[-1].append(shards[number])
    return [range(unit[0].start, unit[-1].stop) for unit in units]


def _refuse_bad(spec: DataSpec, source: Source, bad: int, where: str) -> None:
    if bad > spec.max_bad_fraction * source.num_samples:
        raise UsageError(
            f"{bad:,} of {source.num_samples:,} samples are unreadable or have no image or caption, more than the allowed "
            f"{spec.max_bad_fraction:.1%} (--max-bad-fraction): {where}"
        )


@torch.no_grad()
def _about(encoder: Encoder, source: Source, spec: DataSpec, of_model: Mapping[str, Any]) -> dict[str, Any]:
    """Return the content of ``embeddings.json``."""
    model: Any = encoder.model
    text = encoder.tokenizer(["a"]).to(next(model.parameters()).device)
    inner: Any = getattr(model, "model", model)  # projection heads wrap the model
    defaults = asdict(DataSpec())
    about = {
        **of_model,
        "precision": encoder.autocast,
        **spec.keys,
        "samples": source.num_samples,
        "width": model.encode_text(text).shape[-1],
        "data": source.index_digest,
        "logit_scale": inner.logit_scale.exp().item(),
        "spec": {name: value for name, value in without_secrets(asdict(spec)).items() if value != defaults[name]},
    }
    return json.loads(
        json.dumps(about, default=str)
    )  # only JSON types, so that the result can be compared with a file's content


def _parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = command_line.Parser(
        prog="openclip-ext embed",
        description="Write a model's embeddings of a data set in the order of sample indices, for --reference. Several "
        "processes under torchrun share the shards. The same command continues an interrupted run.",
    )
    data = "shards, a CSV file or a table, as in --train-data, and then a run folder LOGS/NAME unless a flag names the model"
    parser.add_argument("train_data", nargs="+", metavar="DATA", help=data)
    parser.add_argument("--model", help=shared.MODEL_HELP + "; default: the model of --pretrained")
    # --checkpoint is an alias of --pretrained, because error messages that all evaluations share contain this name.
    names = ("--pretrained", "--checkpoint")
    parser.add_argument(*names, dest="checkpoint", help=f"pretrained tag of the model, or {shared.REF_HELP}")
    parser.add_argument("--output", type=output_path, required=True, metavar="FOLDER", help="folder for the embeddings")
    shared.add_running_arguments(parser)
    parser.add_argument(
        "--precision",
        choices=("fp32", "amp"),
        default="amp" if torch.cuda.is_available() else "fp32",
        help="amp: autocast (CUDA only; default if there is a GPU); fp32: float32",
    )
    group = parser.add_argument_group("data", "the same flags as in training")
    group.add_argument("--dataset-type", choices=("auto", "webdataset", "csv"), default="auto")
    group.add_argument("--csv-separator", default=DataSpec.csv_separator)
    group.add_argument("--csv-img-key")
    group.add_argument("--csv-caption-key")
    for option in own_options([DataSpec]):
        if option.name not in ("reference", "hard_negative_key", "single_source_batches"):
            default = "" if option.default in (None, ()) else f" (default: {option.default})"
            group.add_argument(option.flag, type=option.type, default=option.default, help=option.help + default)
    unused = ("reference", "train_num_samples", "train_data_upsampling_factors", "hard_negative_key")
    group.set_defaults(dataset_resampled=False, single_source_batches=False, **dict.fromkeys(unused))
    shared.add_model_options(parser)
    args = parser.parse_args(argv)
    takes_run = args.model is None and args.checkpoint is None and len(args.train_data) > 1
    # The columns and keys of the model's run are the defaults.
    parser.set_defaults(**data_flags(flags_of_ref(args.train_data[-1] if takes_run else args.checkpoint)))
    args = parser.parse_args(argv)
    if takes_run:
        *args.train_data, args.checkpoint = args.train_data
    if args.model is None and args.checkpoint is None:
        parser.error("no model given: add LOGS/NAME of a run, or --model and --pretrained")
    args.train_data = args.train_data if args.train_data[1:] else args.train_data[0]
    try:
        check_flags(DataSpec, vars(args))
    except OptionError as error:
        parser.error(with_flags(str(error), {}))
    return args


if __name__ == "__main__":
    command_line.run(main)
