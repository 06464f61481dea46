"""Score zero-shot classification and retrieval on the demo set's test split: ``python -m eval.shapes``.

Classification uses the images with one item, and averages prompts over backgrounds. Retrieval and the relation task use the
complete captions, because training captions leave out so many words that most of them fit several images.
``python -m openclip_ext.data.demo --split test --output DIR --num-samples 4000`` makes the test split.
"""

import argparse
import io
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import open_clip
import torch
from PIL import Image
from torch import Tensor, nn

from openclip_ext.cli import command_line
from openclip_ext.data.demo.scene import BACKGROUNDS, COLORS, HELD_OUT_PAIRS, PAIRS, RELATIONS, SHAPES, Scene, describe
from openclip_ext.evaluation.data import read_shard
from openclip_ext.evaluation.features import Encoder
from openclip_ext.evaluation.models import ImageTextModel, LoadedModel, load_model
from openclip_ext.evaluation.ranks import ranks_of_best_match
from openclip_ext.files import json_lines
from openclip_ext.files.writing import output_path
from openclip_ext.model_configs import add_model_configs

MAX_CANDIDATES = 1000
# A class is described without a background, and on every background.
_TEMPLATES = ("{c}", *(f"{{c}} on {background}" for background in BACKGROUNDS))
Tokenizer = Callable[[list[str]], Tensor]
Preprocess = Callable[[Image.Image], Tensor]

# Metric -> its title, and the score of guessing (None if that depends on the captions).
_METRICS: dict[str, tuple[str, float | None]] = {
    "shape-top1": ("zero-shot shape", 1 / len(SHAPES)),
    "color-top1": ("zero-shot color", 1 / len(COLORS)),
    "shape-color-top1": ("zero-shot shape x color", 1 / len(PAIRS)),
    "held-out-top1": ("  of which never seen together", 1 / len(PAIRS)),
    "relation-top1": ("relation of two items", 1 / len(RELATIONS)),
    "image-to-text-R@1": ("retrieval image to text, R@1", None),
    "text-to-image-R@1": ("retrieval text to image, R@1", None),
}


@dataclass(frozen=True)
class ShapesSample:
    """Holds an image of the test split, its scene and its caption."""

    png: bytes
    scene: Scene
    caption: str


class ShapesEvaluator:
    """Performs all tasks on a folder of test shards."""

    def __init__(self, data_dir: str | Path, preprocess: Preprocess, tokenizer: Tokenizer, batch_size: int = 250):
        self.samples = read_samples(Path(data_dir))
        self.preprocess = preprocess
        self.tokenizer = tokenizer
        self.batch_size = batch_size
        self.singles = [number for number, sample in enumerate(self.samples) if sample.scene.relation is None]
        self.doubles = [number for number, sample in enumerate(self.samples) if sample.scene.relation is not None]
        self.captions = [sample.caption for sample in self.samples[:MAX_CANDIDATES]]

    def run(self, model: nn.Module) -> dict[str, float]:
        """Return an OpenCLIP model's accuracies between 0 and 1; the model's training mode is restored afterwards."""
        was_training = model.training
        model.eval()
        device = next(model.parameters()).device
        encoder = Encoder(
            cast(ImageTextModel, model), self.preprocess, self.tokenizer, device, batch_size=self.batch_size
        )
        try:
            images = torch.cat([encoder.encode_images(batch) for batch in self._images()])
            return {
                **self._classify(encoder, images[self.singles]),
                "relation-top1": self._tell_relations(encoder, images[self.doubles]),
                **self._retrieve(encoder, images[: len(self.captions)]),
            }
        finally:
            model.train(was_training)

    def chance(self) -> dict[str, float]:
        """Return the score of guessing in each metric of `run`."""
        matches = sum(self.captions.count(caption) for caption in self.captions)
        recall = matches / len(self.captions) ** 2
        return {name: recall if chance is None else chance for name, (_, chance) in _METRICS.items()}

    def _classify(self, encoder: Encoder, images: Tensor) -> dict[str, float]:
        items = [self.samples[number].scene.items[0] for number in self.singles]

        def hits(phrases: dict[Any, str], truth: list[Any]) -> Tensor:
            """Return ``(N,)`` whether each image is nearest to its class; ``phrases`` describe the classes."""
            weights = encoder.class_embeddings(list(map(_with_article, phrases.values())), _TEMPLATES)
            wanted = torch.tensor([list(phrases).index(name) for name in truth], device=images.device)
            return ((images @ weights.T).argmax(dim=1) == wanted).double()

        both = hits({pair: f"{pair[1]} {pair[0]}" for pair in PAIRS}, [item.pair for item in items])
        held_out = torch.tensor([item.pair in HELD_OUT_PAIRS for item in items], device=both.device)
        shape = hits({name: name for name in SHAPES}, [item.shape for item in items])
        color = hits({name: f"{name} shape" for name in COLORS}, [item.color for item in items])
        return {
            "shape-top1": shape.mean().item(),
            "color-top1": color.mean().item(),
            "shape-color-top1": both.mean().item(),
            "held-out-top1": both[held_out].mean().item(),
        }

    def _tell_relations(self, encoder: Encoder, images: Tensor) -> float:
        """Return how often the caption with the true relation beats the same caption with each of the three others."""
        scenes = [self.samples[number].scene for number in self.doubles]
        texts = encoder.encode_texts([describe(scene, relation) for scene in scenes for relation in RELATIONS])
        scores = torch.einsum("nd,nrd->nr", images, texts.unflatten(0, (-1, len(RELATIONS))))
        wanted = torch.tensor([RELATIONS.index(scene.relation) for scene in scenes], device=scores.device)
        return (scores.argmax(dim=1) == wanted).double().mean().item()

    def _retrieve(self, encoder: Encoder, images: Tensor) -> dict[str, float]:
        """Return recall at 1; any equal caption is right."""
        texts = encoder.encode_texts(self.captions)
        labels = torch.tensor([self.captions.index(caption) for caption in self.captions], device=texts.device)
        ways = {"image-to-text-R@1": (images, texts), "text-to-image-R@1": (texts, images)}
        ranks = {name: ranks_of_best_match(*way, labels, labels, ties_by_index=True) for name, way in ways.items()}
        return {name: (found == 0).double().mean().item() for name, found in ranks.items()}

    def _images(self) -> Iterator[Tensor]:
        """Yield the images of all samples in batches ``(b, 3, H, W)``, in order."""
        for start in range(0, len(self.samples), self.batch_size):
            samples = self.samples[start : start + self.batch_size]
            yield torch.stack([self.preprocess(Image.open(io.BytesIO(one.png)).convert("RGB")) for one in samples])


def read_samples(data_dir: Path) -> list[ShapesSample]:
    """Read all shards of a folder into memory (a sample takes about 3 kB)."""
    shards = sorted(data_dir.glob("*.tar"))
    if not shards:
        raise ValueError(
            f"no *.tar in {data_dir}: make the test split with "
            f"python -m openclip_ext.data.demo --split test --num-samples 4000 --output {data_dir}"
        )
    samples = []
    for shard, (key, fields) in ((path, entry) for path in shards for entry in read_shard(path)):
        try:
            attributes = json.loads(fields["json"])
            samples.append(
                ShapesSample(fields["png"], Scene.from_attributes(attributes), attributes["complete_caption"])
            )
        except KeyError as error:
            raise ValueError(f"{shard}: sample {key} is not of the demo set, because {error} is missing") from error
    kinds = {sample.scene.relation is None for sample in samples}
    held_out = any(item.pair in HELD_OUT_PAIRS for sample in samples for item in sample.scene.items)
    if kinds != {True, False} or not held_out:
        raise ValueError(
            f"{data_dir} has {len(samples)} samples, but not of every kind (one item, two items, held-out pairs): "
            "it is the train split or too small; make one with --split test --num-samples 4000"
        )
    return samples


def _with_article(words: str) -> str:
    return f"{'an' if words[0] in 'aeiou' else 'a'} {words}"


def untrained(model_name: str, device: str, seed: int = 0) -> LoadedModel:
    """Build a model with random weights."""
    torch.manual_seed(seed)
    with command_line.without_warnings():
        model, _, preprocess = open_clip.create_model_and_transforms(model_name, device=device)
    return LoadedModel(model.eval(), preprocess, open_clip.get_tokenizer(model_name), model_name, "", {}, "")


def format_table(columns: dict[str, dict[str, float]]) -> str:
    """Format a Markdown table with a row for each metric and a column for each model."""
    width = max(len(title) for title, _ in _METRICS.values())
    lines = [f"| {'':{width}} | " + " | ".join(f"{title:>9}" for title in columns) + " |"]
    lines.append(f"|:{'-' * width}-|" + "|".join("-" * 10 + ":" for _ in columns) + "|")
    for key, (title, _) in _METRICS.items():
        lines.append(f"| {title:{width}} | " + " | ".join(f"{column[key]:9.3f}" for column in columns.values()) + " |")
    return "\n".join(lines)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m openclip_ext.evaluation.shapes",
        description="Score zero-shot classification and retrieval on the demo set's test split.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--data-dir", required=True, help="folder with the shards of the test split")
    parser.add_argument("--model", default="demo-resnet", help="name of an OpenCLIP model configuration")
    parser.add_argument("--checkpoint", help="training checkpoint; without one, random weights are scored")
    parser.add_argument("--untrained", action="store_true", help="also score random weights")
    parser.add_argument("--batch-size", type=int, default=250)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seed", type=int, default=0, help="seed of the random weights")
    parser.add_argument("--json", type=output_path, help="also write the numbers to this file")
    return parser


def main(argv: list[str]) -> None:
    """Score the checkpoint, or random weights, or both, and print the table."""
    args = _parser().parse_args(argv)
    add_model_configs()
    loaded = {}
    if args.checkpoint:
        loaded["trained"] = load_model(args.model, args.checkpoint, args.device)
    if args.untrained or not args.checkpoint:
        loaded["untrained"] = untrained(args.model, args.device, args.seed)
    columns: dict[str, dict[str, float]] = {}
    for title, one in loaded.items():
        evaluator = ShapesEvaluator(args.data_dir, one.preprocess, one.tokenizer, args.batch_size)
        columns[title] = evaluator.run(one.model)
    columns["chance"] = evaluator.chance()
    print(format_table(columns))
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(
            json_lines.dumps({"model": args.model, "checkpoint": args.checkpoint, **columns}, indent=1)
        )


if __name__ == "__main__":
    command_line.run(main)
