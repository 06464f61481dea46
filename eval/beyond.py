"""``python -m eval.beyond``: clip-benchmark's data sets beyond DataComp's, on our checkpoints.

clip-benchmark 1.6.2 makes the data sets, their class names and templates; its command line, though, stops in its own
accuracy with numpy from 2.4 on and knows neither the demo models nor checkpoints with heads. This module
calls its working parts: the data sets, mean average precision, image-caption selection.
"""

import argparse
import json
import logging
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader

from .classification import class_logits
from .command_line import add_model_arguments, load_encoder
from .features import Encoder
from .metrics import Metrics, classification_metrics, target_ranks
from .retrieval import score_captions

TASKS = ("auto", "zeroshot_classification", "zeroshot_retrieval", "image_caption_selection")
logger = logging.getLogger("eval.beyond")


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line; names and meanings are clip-benchmark's where it has them."""
    parser = argparse.ArgumentParser(prog=f"python -m {__package__}.beyond", description=__doc__.split("\n", 1)[0])
    add_model_arguments(parser)
    parser.add_argument(
        "--dataset", nargs="+", required=True, help="clip-benchmark's names, collections (vtab+, sugar_crepe, ...) too"
    )
    parser.add_argument("--dataset-root", default="root", help="folder; {dataset} in it stands for the name")
    parser.add_argument("--split", default="test")
    parser.add_argument("--language", default="en", help="of class names, templates and captions")
    parser.add_argument("--task", choices=TASKS, default="auto")
    parser.add_argument("--annotation-file", default="", help="captions of retrieval sets")
    parser.add_argument("--download", action="store_true", help="let clip-benchmark fetch a root that does not exist")
    parser.add_argument("--output", help="append the JSON lines to this file, too")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Evaluate; return the exit status: 0, 1 if a data set failed, 2 if nothing could be evaluated."""
    logging.basicConfig(format="%(levelname)s: %(message)s", level=logging.WARNING)
    args = parse_args(argv)
    try:
        loaded, encoder = load_encoder(args)
    except ValueError as error:
        logger.error(error)
        return 2
    failed = False
    for name in expand_collections(args.dataset):
        try:
            metrics = evaluate_dataset(name, encoder, args)
        except Exception as error:
            failed = True
            logger.error(f"{name}: {type(error).__name__}: {error}")
            continue
        line = json.dumps({"dataset": name, "metrics": metrics, "model": loaded.name, "weights": loaded.weights_sha256})
        print(line, flush=True)
        if args.output:
            with open(args.output, "a", encoding="utf-8") as stream:
                stream.write(line + "\n")
    return int(failed)


def expand_collections(names: Iterable[str]) -> list[str]:
    """Return data set names with clip-benchmark's collections written out."""
    from clip_benchmark.datasets.builder import dataset_collection

    return [member for name in names for member in dataset_collection.get(name, [name])]


def evaluate_dataset(name: str, encoder: Encoder, args: argparse.Namespace) -> Metrics:
    """Score one of clip-benchmark's data sets, by its name there; ``args`` say where it is, and of what kind.

    Raises:
        FileNotFoundError: if the root does not exist and may not be fetched. clip-benchmark raises its own exceptions
            for other faults of the data.
    """
    from clip_benchmark.datasets.builder import build_dataset, get_dataset_collate_fn, get_dataset_default_task

    # A local WebDataset in its format may say itself that it is for retrieval.
    root = args.dataset_root.format(dataset=name.removeprefix("wds/").replace("/", "-"))
    if not Path(root).exists() and not args.download:
        # clip-benchmark would call wget, whatever its `download` says.
        raise FileNotFoundError(
            f"there is no {root}: set --dataset-root, or let clip-benchmark fetch it with --download"
        )
    kind_file = Path(root) / "dataset_type.txt"
    captions = name.startswith("wds/") and kind_file.is_file() and kind_file.read_text().strip() == "retrieval"
    task = args.task
    if task == "auto":
        task = "zeroshot_retrieval" if captions else get_dataset_default_task(name)
    dataset = build_dataset(
        name,
        root=root,
        transform=encoder.preprocess,
        split=args.split,
        download=args.download,
        annotation_file=args.annotation_file,
        language=args.language,
        task=task,
    )
    streamed = name.startswith("wds/")
    loader = DataLoader(
        dataset,
        encoder.batch_size,
        # Reading a stream with more workers than shards fails, and the number of shards is not known here.
        num_workers=min(encoder.workers, 1) if streamed else encoder.workers,
        collate_fn=_captions_as_lists if task != "zeroshot_classification" else get_dataset_collate_fn(name),
        generator=torch.Generator(),
    )
    if task == "zeroshot_classification":
        return _classification(dataset.classes, dataset.templates, loader, encoder)
    if task == "zeroshot_retrieval":
        return _retrieval(loader, encoder)
    from clip_benchmark.metrics import image_caption_selection

    amp = encoder.precision != "fp32"
    return image_caption_selection.evaluate(encoder.model, loader, encoder.tokenizer, encoder.device.type, amp=amp)


def _captions_as_lists(samples: list[tuple[Tensor, Sequence[str]]]) -> tuple[Tensor, list[list[str]]]:
    images, captions = zip(*samples, strict=True)
    return torch.stack(images), [list(own) for own in captions]


def _classification(
    classnames: Sequence[str], templates: Any, loader: Iterable[tuple[Tensor, Tensor]], encoder: Encoder
) -> Metrics:
    """Compute accuracy, or mean average precision where the labels are vectors."""
    if isinstance(templates, dict):  # prompts of each class, CuPL
        means = [encoder.encode_texts(templates[name]).mean(dim=0) for name in classnames]
        weights = F.normalize(torch.stack(means), dim=-1)
    else:
        weights = encoder.class_embeddings(classnames, templates)
    logits, labels = [], []
    with encoder.progress(None, "images", "image") as bar:
        for images, targets in loader:
            logits.append(class_logits(encoder.encode_images(images), weights).cpu())
            labels.append(targets)
            bar.update(len(images))
    scores, targets = torch.cat(logits), torch.cat(labels)
    if targets.ndim == 2:
        from clip_benchmark.metrics.zeroshot_classification import average_precision_per_class

        return {"mean_average_precision": average_precision_per_class(scores, targets).mean().item()}
    if targets.min() < 0 or targets.max() >= len(classnames):
        raise ValueError(f"labels {targets.min()} to {targets.max()} are outside the {len(classnames)} classes")
    ranks = target_ranks(scores, targets).numpy()
    return classification_metrics(targets.numpy(), scores.argmax(dim=1).numpy(), ranks, len(classnames))


def _retrieval(loader: Iterable[tuple[Tensor, list[list[str]]]], encoder: Encoder) -> Metrics:
    features: list[Tensor] = []
    captions: list[list[str]] = []
    with encoder.progress(None, "images", "image") as bar:
        for images, batch_captions in loader:
            features.append(encoder.encode_images(images, autocast=True))
            captions += batch_captions
            bar.update(len(images))
    return score_captions(encoder, torch.cat(features), captions)


if __name__ == "__main__":
    sys.exit(main())
