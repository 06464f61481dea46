"""Score zero-shot classification and retrieval on the demo set's test split: ``python -m eval.shapes``.

Classification uses the images with one item, and averages prompts over backgrounds. Retrieval and the relation task use the
complete captions, because training captions leave out so many words that most of them fit several images.
``python -m openclip_ext.data.shapes --split test --output DIR --num-samples 4000`` makes the test split.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import open_clip
import torch
from torch import Tensor

from openclip_ext.cli import command_line
from openclip_ext.data.shapes.scene import (
    BACKGROUNDS,
    COLORS,
    HELD_OUT_PAIRS,
    PAIRS,
    RELATIONS,
    SHAPES,
    Item,
    Scene,
    describe,
)
from openclip_ext.evaluation.data import SampleFormat, Samples, StoredSample, read_shard
from openclip_ext.evaluation.features import Encoder
from openclip_ext.evaluation.models import load_model
from openclip_ext.evaluation.ranks import ranks_of_best_match
from openclip_ext.files import json_lines
from openclip_ext.files.writing import output_path
from openclip_ext.model_configs import add_model_configs

MAX_CANDIDATES = 1000
# A class is described without a background, and on every background.
_TEMPLATES = ("{c}", *(f"{{c}} on {background}" for background in BACKGROUNDS))

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


class ShapesSample(NamedTuple):
    """An image of the test split, its scene and its complete caption."""

    image: StoredSample
    scene: Scene
    caption: str


def score(encoder: Encoder, samples: Sequence[ShapesSample]) -> dict[str, float]:
    """Return the accuracies between 0 and 1 of all tasks."""

    def compute(batch: Samples) -> dict[str, Tensor]:
        return {"image": encoder.encode_images(batch.values["image"])}

    stored = [sample.image for sample in samples]
    images = encoder.collect(encoder.batches(stored, SampleFormat()), compute, "demo", len(stored)).values["image"]
    scenes = [sample.scene for sample in samples]
    is_single = torch.tensor([scene.relation is None for scene in scenes], device=images.device)
    captions = _candidates(samples)
    return {
        **_classify(encoder, images[is_single], [scene.items[0] for scene in scenes if scene.relation is None]),
        "relation-top1": _tell_relations(
            encoder, images[~is_single], [one for one in scenes if one.relation is not None]
        ),
        **_retrieve(encoder, images[: len(captions)], captions),
    }


def chance(samples: Sequence[ShapesSample]) -> dict[str, float]:
    """Return the score of guessing in each metric of `score`."""
    captions = _candidates(samples)
    recall = sum(captions.count(caption) for caption in captions) / len(captions) ** 2
    return {name: recall if value is None else value for name, (_, value) in _METRICS.items()}


def _candidates(samples: Sequence[ShapesSample]) -> list[str]:
    return [sample.caption for sample in samples[:MAX_CANDIDATES]]


def _classify(encoder: Encoder, images: Tensor, items: Sequence[Item]) -> dict[str, float]:
    def hits(phrases: dict[Any, str], truth: list[Any]) -> Tensor:
        """Return ``(N,)`` whether each image is nearest to its class; ``phrases`` describe the classes."""
        weights = encoder.class_embeddings(list(map(_with_article, phrases.values())), _TEMPLATES)
        wanted = torch.tensor([list(phrases).index(name) for name in truth], device=images.device)
        return ((images @ weights.T).argmax(dim=1) == wanted).double()

    both = hits({pair: f"{pair[1]} {pair[0]}" for pair in PAIRS}, [item.pair for item in items])
    held_out = torch.tensor([item.pair in HELD_OUT_PAIRS for item in items], device=both.device)
    shape = hits({name: name for name in SHAPES}, [item.shape for item in items])
    color = hits({name: f"{name} shape" for name in COLORS}, [item.color for item in items])
    found = {"shape": shape, "color": color, "shape-color": both, "held-out": both[held_out]}
    return {f"{name}-top1": right.mean().item() for name, right in found.items()}


def _tell_relations(encoder: Encoder, images: Tensor, scenes: Sequence[Scene]) -> float:
    """Return how often the caption with the true relation beats the same caption with each of the three others."""
    texts = encoder.encode_texts([describe(scene, relation) for scene in scenes for relation in RELATIONS])
    scores = torch.einsum("nd,nrd->nr", images, texts.unflatten(0, (-1, len(RELATIONS))))
    wanted = torch.tensor([RELATIONS.index(scene.relation) for scene in scenes], device=scores.device)
    return (scores.argmax(dim=1) == wanted).double().mean().item()


def _retrieve(encoder: Encoder, images: Tensor, captions: list[str]) -> dict[str, float]:
    """Return recall at 1; any equal caption is right."""
    texts = encoder.encode_texts(captions)
    labels = torch.tensor([captions.index(caption) for caption in captions], device=texts.device)
    ways = {"image-to-text-R@1": (images, texts), "text-to-image-R@1": (texts, images)}
    ranks = {name: ranks_of_best_match(*way, labels, labels, ties_by_index=True) for name, way in ways.items()}
    return {name: (found == 0).double().mean().item() for name, found in ranks.items()}


def read_samples(data_dir: Path) -> list[ShapesSample]:
    """Read the scenes and captions of all shards of a folder."""
    shards = sorted(data_dir.glob("*.tar"))
    if not shards:
        raise ValueError(
            f"no *.tar in {data_dir}: make the test split with "
            f"python -m openclip_ext.data.shapes --split test --num-samples 4000 --output {data_dir}"
        )
    samples = []
    for shard, found in ((path, sample) for path in shards for sample in read_shard(path, frozenset({"json"}))):
        try:
            attributes = json.loads(found.fields["json"])
            image = StoredSample(shard, found.key, {"png": dict(zip(found.found, found.members, strict=True))["png"]})
            samples.append(ShapesSample(image, Scene.from_attributes(attributes), attributes["complete_caption"]))
        except KeyError as error:
            raise ValueError(
                f"{shard}: sample {found.key} is not of the demo set, because {error} is missing"
            ) from error
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
    parser.add_argument("--data-dir", type=Path, required=True, help="folder with the shards of the test split")
    parser.add_argument("--model", default="demo-resnet", help="name of an OpenCLIP model configuration")
    parser.add_argument("--checkpoint", help="training checkpoint; without one, random weights are scored")
    parser.add_argument("--untrained", action="store_true", help="also score random weights")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", type=output_path, help="also write the numbers to this file")
    return parser


def main(argv: list[str]) -> None:
    """Score the checkpoint, or random weights, or both, and print the table."""
    args = _parser().parse_args(argv)
    add_model_configs()
    samples = read_samples(args.data_dir)
    models: dict[str, tuple[Any, Any]] = {}
    if args.checkpoint:
        loaded = load_model(args.model, args.checkpoint, args.device)
        models["trained"] = (loaded.model, loaded.preprocess)
    if args.untrained or not args.checkpoint:
        torch.manual_seed(0)
        with command_line.without_warnings():
            model, _, preprocess = open_clip.create_model_and_transforms(args.model, device=args.device)
        models["untrained"] = (model.eval(), preprocess)
    tokenizer, device = open_clip.get_tokenizer(args.model), torch.device(args.device)
    columns = {title: score(Encoder(*parts, tokenizer, device, workers=0), samples) for title, parts in models.items()}
    columns["chance"] = chance(samples)
    print(format_table(columns))
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(
            json_lines.dumps({"model": args.model, "checkpoint": args.checkpoint, **columns}, indent=1)
        )


if __name__ == "__main__":
    command_line.run(main)
