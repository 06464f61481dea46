"""Zero-shot classification and retrieval on the demo set's test split: ``python -m eval.shapes``.

Classification uses the images with one item, with prompts ensembled over backgrounds. Retrieval and the relation task use
the complete captions: training captions leave out so many words that most of them fit several images.
``python -m openclip_ext.data.shapes --split test --output DIR --num-samples 4000`` makes the test split.
"""

import argparse
import io
import json
import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import open_clip
import torch
from PIL import Image
from torch import Tensor, nn

from openclip_ext.data.shapes.scene import (
    BACKGROUNDS,
    COLORS,
    HELD_OUT_PAIRS,
    PAIRS,
    RELATIONS,
    SHAPES,
    Scene,
    describe,
)
from openclip_ext.model_configs import add_model_configs

from .data import read_shard
from .models import ImageTextModel, LoadedModel, load_model

MAX_CANDIDATES = 1000
Tokenizer = Callable[[list[str]], Tensor]
Preprocess = Callable[[Image.Image], Tensor]

_TITLES = {
    "shape-top1": "zero-shot shape",
    "color-top1": "zero-shot color",
    "shape-color-top1": "zero-shot shape x color",
    "held-out-top1": "  of which never seen together",
    "relation-top1": "relation of two items",
    "image-to-text-R@1": "retrieval image to text, R@1",
    "text-to-image-R@1": "retrieval text to image, R@1",
}


@dataclass(frozen=True)
class ShapesSample:
    """One image of the test split, its scene and its caption."""

    png: bytes
    scene: Scene
    caption: str


class ShapesEvaluator:
    """All tasks on one folder of test shards.

    Args:
        data_dir: folder with the shards of the test split.
        preprocess: from a PIL image to the model's input, as ``open_clip.create_model_and_transforms`` returns it.
        tokenizer: as ``open_clip.get_tokenizer`` returns it.
        batch_size: images or texts that go through the model at a time.

    Raises:
        ValueError: the folder has no shards, or they are not of the demo set's test split.
    """

    name = "shapes"

    def __init__(self, data_dir: str | Path, preprocess: Preprocess, tokenizer: Tokenizer, batch_size: int = 250):
        self.samples = read_samples(Path(data_dir))
        self.preprocess = preprocess
        self.tokenizer = tokenizer
        self.batch_size = batch_size
        self.singles = [number for number, sample in enumerate(self.samples) if sample.scene.relation is None]
        self.doubles = [number for number, sample in enumerate(self.samples) if sample.scene.relation is not None]
        self.captions = [sample.caption for sample in self.samples[:MAX_CANDIDATES]]

    @torch.no_grad()
    def run(self, model: nn.Module) -> dict[str, float]:
        """Accuracies between 0 and 1 of an OpenCLIP model; its training mode is restored afterwards."""
        return self._run(cast(ImageTextModel, model))

    def _run(self, model: ImageTextModel) -> dict[str, float]:
        was_training = model.training
        model.eval()
        try:
            images = self._encode_images(model)
            return {
                **self._classify(model, images[self.singles]),
                "relation-top1": self._tell_relations(model, images[self.doubles]),
                **self._retrieve(model, images[: len(self.captions)]),
            }
        finally:
            model.train(was_training)

    def chance(self) -> dict[str, float]:
        """Score of guessing in each metric of `run`."""
        matches = sum(self.captions.count(caption) for caption in self.captions)
        recall = matches / len(self.captions) ** 2
        return {
            "shape-top1": 1 / len(SHAPES),
            "color-top1": 1 / len(COLORS),
            "shape-color-top1": 1 / len(PAIRS),
            "held-out-top1": 1 / len(PAIRS),
            "relation-top1": 1 / len(RELATIONS),
            "image-to-text-R@1": recall,
            "text-to-image-R@1": recall,
        }

    def _classify(self, model: ImageTextModel, images: Tensor) -> dict[str, float]:
        items = [self.samples[number].scene.items[0] for number in self.singles]
        hit = self._zero_shot(model, images, PAIRS, lambda pair: f"{pair[1]} {pair[0]}", [item.pair for item in items])
        held_out = torch.tensor([item.pair in HELD_OUT_PAIRS for item in items], device=hit.device)
        shape = self._zero_shot(model, images, SHAPES, str, [item.shape for item in items])
        color = self._zero_shot(model, images, COLORS, lambda name: f"{name} shape", [item.color for item in items])
        return {
            "shape-top1": _mean(shape),
            "color-top1": _mean(color),
            "shape-color-top1": _mean(hit),
            "held-out-top1": _mean(hit[held_out]),
        }

    def _zero_shot(
        self,
        model: ImageTextModel,
        images: Tensor,
        classes: Sequence[Any],
        phrase: Callable[[Any], str],
        truth: list[Any],
    ) -> Tensor:
        """Whether each image ``(N, d)`` is nearest to the class it belongs to, ``(N,)`` bool."""
        weights = open_clip.build_zero_shot_classifier(
            model,
            self.tokenizer,
            classnames=[phrase(name) for name in classes],
            templates=[_with_article, *(_on(background) for background in BACKGROUNDS)],
            num_classes_per_batch=max(1, self.batch_size // (len(BACKGROUNDS) + 1)),
            device=images.device,
        )
        wanted = torch.tensor([classes.index(name) for name in truth], device=images.device)
        return (images @ weights.to(images)).argmax(dim=1) == wanted

    def _tell_relations(self, model: ImageTextModel, images: Tensor) -> float:
        """How often the caption with the true relation beats the same caption with the three others."""
        scenes = [self.samples[number].scene for number in self.doubles]
        texts = self._encode_texts(model, [describe(scene, relation) for scene in scenes for relation in RELATIONS])
        scores = torch.einsum("nd,nrd->nr", images, texts.view(len(scenes), len(RELATIONS), -1))
        wanted = torch.tensor([RELATIONS.index(scene.relation) for scene in scenes], device=scores.device)
        return _mean(scores.argmax(dim=1) == wanted)

    def _retrieve(self, model: ImageTextModel, images: Tensor) -> dict[str, float]:
        scores = images @ self._encode_texts(model, self.captions).T
        return {
            "image-to-text-R@1": self._recall_at_1(scores),
            "text-to-image-R@1": self._recall_at_1(scores.T),
        }

    def _recall_at_1(self, scores: Tensor) -> float:
        """Share of the rows whose best column has the row's caption; equal captions are equally right."""
        best = scores.argmax(dim=1).tolist()
        hits = sum(self.captions[row] == self.captions[column] for row, column in enumerate(best))
        return hits / len(best)

    def images(self, model: nn.Module) -> Iterator[Tensor]:
        """Batches ``(b, 3, H, W)`` of all samples' images, in order, where and as the model wants them."""
        parameter = next(model.parameters())
        for batch in _batches(self.samples, self.batch_size):
            images = [self.preprocess(Image.open(io.BytesIO(sample.png)).convert("RGB")) for sample in batch]
            yield torch.stack(images).to(parameter.device, parameter.dtype)

    def _encode_images(self, model: ImageTextModel) -> Tensor:
        return torch.cat([model.encode_image(batch, normalize=True).float() for batch in self.images(model)])

    def _encode_texts(self, model: ImageTextModel, texts: list[str]) -> Tensor:
        device = next(model.parameters()).device
        tokens = [self.tokenizer(list(batch)).to(device) for batch in _batches(texts, self.batch_size)]
        return torch.cat([model.encode_text(batch, normalize=True).float() for batch in tokens])


def read_samples(data_dir: Path) -> list[ShapesSample]:
    """Read all shards of a folder into memory (a sample is about 3 kB).

    Raises:
        ValueError: no shards, or not those of the demo set's test split.
    """
    shards = sorted(data_dir.glob("*.tar"))
    if not shards:
        raise ValueError(
            f"no *.tar in {data_dir}: make the test split with "
            f"python -m openclip_ext.data.shapes --split test --num-samples 4000 --output {data_dir}"
        )
    samples = [sample for shard in shards for sample in _read_shard(shard)]
    kinds = {sample.scene.relation is None for sample in samples}
    held_out = any(item.pair in HELD_OUT_PAIRS for sample in samples for item in sample.scene.items)
    if kinds != {True, False} or not held_out:
        raise ValueError(
            f"{data_dir} has {len(samples)} samples, but not of every kind (one item, two items, held-out pairs): "
            "it is the train split or too small; make one with --split test --num-samples 4000"
        )
    return samples


def _read_shard(shard: Path) -> Iterator[ShapesSample]:
    for key, fields in read_shard(shard):
        try:
            attributes = json.loads(fields["json"])
            scene = Scene.from_attributes(attributes)
            yield ShapesSample(fields["png"], scene, attributes["complete_caption"])
        except KeyError as error:
            raise ValueError(f"{shard}: sample {key} is not one of the demo set, {error} is missing") from error


def _batches(sequence: Sequence[Any], size: int) -> Iterator[Sequence[Any]]:
    return (sequence[first : first + size] for first in range(0, len(sequence), size))


def _with_article(words: str) -> str:
    return f"{'an' if words[0] in 'aeiou' else 'a'} {words}"


def _on(background: str) -> Callable[[str], str]:
    return lambda words: f"{_with_article(words)} on {background}"


def _mean(hits: Tensor) -> float:
    return hits.double().mean().item()


def evaluate(
    model_name: str, checkpoint: str | None, data_dir: str, batch_size: int, device: str, seed: int = 0
) -> tuple[dict[str, float], dict[str, float]]:
    """Score a checkpoint (see :func:`eval.models.load_model`), or without one random weights.

    Returns:
        The metrics, and the scores of guessing.

    Raises:
        ValueError: no such checkpoint, or of another model; not the demo set's test split.
    """
    loaded = load_model(model_name, checkpoint, device) if checkpoint else untrained(model_name, device, seed)
    evaluator = ShapesEvaluator(data_dir, loaded.preprocess, loaded.tokenizer, batch_size)
    return evaluator.run(loaded.model), evaluator.chance()


def untrained(model_name: str, device: str, seed: int = 0) -> LoadedModel:
    """A model with random weights."""
    torch.manual_seed(seed)
    logging.disable(logging.WARNING)  # OpenCLIP warns that the weights are random
    try:
        model, _, preprocess = open_clip.create_model_and_transforms(model_name, device=device)
    finally:
        logging.disable(logging.NOTSET)
    tokenizer = open_clip.get_tokenizer(model_name)
    return LoadedModel(
        model.eval(), preprocess, tokenizer, name=model_name, checkpoint="", config={}, weights_sha256=""
    )


def format_table(columns: dict[str, dict[str, float]]) -> str:
    """A Markdown table: a row a metric, a column a model."""
    width = max(map(len, _TITLES.values()))
    lines = [f"| {'':{width}} | " + " | ".join(f"{title:>9}" for title in columns) + " |"]
    lines.append(f"|:{'-' * width}-|" + "|".join("-" * 10 + ":" for _ in columns) + "|")
    for key, title in _TITLES.items():
        lines.append(f"| {title:{width}} | " + " | ".join(f"{column[key]:9.3f}" for column in columns.values()) + " |")
    return "\n".join(lines)


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog=f"python -m {__package__}.shapes",
        description="Zero-shot classification and retrieval on the demo set's test split.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--data-dir", required=True, help="folder with the shards of the test split")
    parser.add_argument("--model", default="demo-resnet", help="name of an OpenCLIP model configuration")
    parser.add_argument("--checkpoint", help="path of a training checkpoint; without it, random weights are scored")
    parser.add_argument("--untrained", action="store_true", help="score random weights, too, next to the checkpoint")
    parser.add_argument("--batch-size", type=int, default=250)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seed", type=int, default=0, help="of the random weights")
    parser.add_argument("--json", type=Path, help="write the numbers to this file, too")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    logging.basicConfig(format="%(levelname)s: %(message)s", level=logging.WARNING)
    if args.checkpoint and not Path(args.checkpoint).is_file():
        sys.exit(f"error: no checkpoint at {args.checkpoint}")
    add_model_configs()
    columns: dict[str, dict[str, float]] = {}
    chance: dict[str, float] = {}
    checkpoints = {"trained": args.checkpoint} if args.checkpoint else {}
    if args.untrained or not args.checkpoint:
        checkpoints["untrained"] = None
    try:
        for title, path in checkpoints.items():
            columns[title], chance = evaluate(args.model, path, args.data_dir, args.batch_size, args.device, args.seed)
    except ValueError as error:
        sys.exit(f"error: {error}")
    columns["chance"] = chance
    print(format_table(columns))
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps({"model": args.model, "checkpoint": args.checkpoint, **columns}, indent=1))


if __name__ == "__main__":
    main()
