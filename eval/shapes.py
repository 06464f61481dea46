"""Score zero-shot classification and retrieval on the demo set's test split: ``python -m eval.shapes``.

Classification uses the images with one item, and averages the embeddings of prompts with different backgrounds. Retrieval and
the relation task use complete captions, because most training captions omit words and therefore match several images.
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
from openclip_ext.data.shapes import scene as shapes
from openclip_ext.data.shapes.scene import Item, Scene
from openclip_ext.evaluation import ranks
from openclip_ext.evaluation.encoder import Encoder
from openclip_ext.evaluation.models import open_model
from openclip_ext.evaluation.samples import Samples, StoredSample, read_shard, stored_in
from openclip_ext.files import json_lines
from openclip_ext.files.writing import output_path, write_text
from openclip_ext.model_configs import add_model_configs

MAX_CANDIDATES = 1000
# The prompts of a class: one without a background, and one for each background.
_TEMPLATES = ("{c}", *(f"{{c}} on {background}" for background in shapes.BACKGROUNDS))

# Metric -> its title, and the score of random guessing (None if the score depends on the captions).
_METRICS: dict[str, tuple[str, float | None]] = {
    "shape-top1": ("zero-shot shape", 1 / len(shapes.SHAPES)),
    "color-top1": ("zero-shot color", 1 / len(shapes.COLORS)),
    "shape-color-top1": ("zero-shot shape x color", 1 / len(shapes.PAIRS)),
    "held-out-top1": ("  of which never seen together", 1 / len(shapes.PAIRS)),
    "relation-top1": ("relation of two items", 1 / len(shapes.RELATIONS)),
    "image-to-text-R@1": ("retrieval image to text, R@1", None),
    "text-to-image-R@1": ("retrieval text to image, R@1", None),
}


class ShapesSample(NamedTuple):
    """An image of the test split, its scene and its complete caption."""

    image: StoredSample
    scene: Scene
    caption: str


def score(encoder: Encoder, samples: Sequence[ShapesSample]) -> dict[str, float]:
    """Return the scores of all tasks, between 0 and 1."""
    images = encoder.embed_images(Samples("demo", [sample.image for sample in samples])).values["image"]
    single = [sample.scene for sample in samples if sample.scene.relation is None]
    double = [sample.scene for sample in samples if sample.scene.relation is not None]
    is_single = torch.tensor([sample.scene.relation is None for sample in samples], device=images.device)
    captions = _candidates(samples)
    return {
        **_classify(encoder, images[is_single], [scene.items[0] for scene in single]),
        "relation-top1": _score_relations(encoder, images[~is_single], double),
        **_retrieve(encoder, images[: len(captions)], captions),
    }


def chance(samples: Sequence[ShapesSample]) -> dict[str, float]:
    """Return the expected score of random guessing for each metric of `score`."""
    captions = _candidates(samples)
    recall = {_recall(name): value for name, value in ranks.chance(range(len(captions)), captions).items()}
    return {name: value for name, (_, value) in _METRICS.items() if value is not None} | recall


def _candidates(samples: Sequence[ShapesSample]) -> list[str]:
    return [sample.caption for sample in samples[:MAX_CANDIDATES]]


def _classify(encoder: Encoder, images: Tensor, items: Sequence[Item]) -> dict[str, float]:
    def hits(phrases: dict[Any, str], truth: list[Any]) -> Tensor:
        """Return ``(N,)``: 1 if an image's nearest class equals ``truth``, otherwise 0. ``phrases`` describes the classes."""
        names = [f"{'an' if words[0] in 'aeiou' else 'a'} {words}" for words in phrases.values()]
        weights = encoder.class_embeddings(names, _TEMPLATES)
        wanted = torch.tensor([list(phrases).index(name) for name in truth], device=images.device)
        return ((images @ weights.T).argmax(dim=1) == wanted).double()

    both = hits({pair: f"{pair[1]} {pair[0]}" for pair in shapes.PAIRS}, [item.pair for item in items])
    held_out = torch.tensor([item.pair in shapes.HELD_OUT_PAIRS for item in items], device=both.device)
    shape = hits({name: name for name in shapes.SHAPES}, [item.shape for item in items])
    color = hits({name: f"{name} shape" for name in shapes.COLORS}, [item.color for item in items])
    found = {"shape": shape, "color": color, "shape-color": both, "held-out": both[held_out]}
    return {f"{name}-top1": right.mean().item() for name, right in found.items()}


def _score_relations(encoder: Encoder, images: Tensor, scenes: Sequence[Scene]) -> float:
    """Return the fraction of images whose nearest caption, of four that differ in the relation, has the true relation."""
    texts = encoder.encode_texts(
        [shapes.describe(scene, relation) for scene in scenes for relation in shapes.RELATIONS]
    )
    scores = torch.einsum("nd,nrd->nr", images, texts.unflatten(0, (-1, len(shapes.RELATIONS))))
    wanted = torch.tensor([shapes.RELATIONS.index(scene.relation) for scene in scenes], device=scores.device)
    return (scores.argmax(dim=1) == wanted).double().mean().item()


def _retrieve(encoder: Encoder, images: Tensor, captions: list[str]) -> dict[str, float]:
    """Return recall at 1 in both directions. An image and a caption match if the caption equals the image's own caption."""
    found = ranks.image_text_ranks(images, encoder.encode_texts(captions), range(len(captions)), captions)
    return {_recall(name): float(of.hits().mean()) for name, of in found.items()}


def _recall(direction: str) -> str:
    return f"{direction.replace('_', '-')}-R@1"


def read_samples(data_dir: Path) -> list[ShapesSample]:
    """Read the samples of all shards in a folder; raise ValueError if they are not the demo set's test split."""
    samples = []
    for shard in sorted(data_dir.glob("*.tar")):
        for found in read_shard(shard, frozenset({"json"})):
            try:
                attributes = json.loads(found.fields["json"])
                scene, caption = Scene.from_attributes(attributes), attributes["complete_caption"]
                samples.append(ShapesSample(stored_in(shard, found), scene, caption))
            except KeyError as error:
                raise ValueError(f"{shard}: sample {found.key} is not from the demo set: {error} is missing") from error
    kinds = {sample.scene.relation is None for sample in samples}
    held_out = any(item.pair in shapes.HELD_OUT_PAIRS for sample in samples for item in sample.scene.items)
    if kinds != {True, False} or not held_out:
        raise ValueError(
            f"{data_dir} is not the test split: expected images of one item, of two items, and of pairs that training "
            f"lacks, found {len(samples)} images. Make it with python -m openclip_ext.data.shapes --split test "
            f"--num-samples 4000 --output {data_dir}"
        )
    return samples


def format_table(columns: dict[str, dict[str, float]]) -> str:
    """Format a Markdown table with one row per metric and one column per model."""
    width = max(len(title) for title, _ in _METRICS.values())
    lines = [f"| {'':{width}} | " + " | ".join(f"{title:>9}" for title in columns) + " |"]
    lines.append(f"|:{'-' * width}-|" + "|".join("-" * 10 + ":" for _ in columns) + "|")
    for key, (title, _) in _METRICS.items():
        lines.append(f"| {title:{width}} | " + " | ".join(f"{column[key]:9.3f}" for column in columns.values()) + " |")
    return "\n".join(lines)


def _parser() -> argparse.ArgumentParser:
    parser = command_line.Parser(
        prog="python -m eval.shapes",
        description="Score zero-shot classification and retrieval on the demo set's test split.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--data-dir", type=Path, required=True, help="folder with the shards of the test split")
    parser.add_argument("--model", default="demo-resnet", help="name of an OpenCLIP model configuration")
    parser.add_argument(
        "--checkpoint",
        nargs="+",
        default=[],
        help="training checkpoints; without this flag, a model with random weights is scored",
    )
    parser.add_argument("--untrained", action="store_true", help="also score a model with random weights")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", type=output_path, help="also write the numbers to this file")
    return parser


def _titles(checkpoints: Sequence[str]) -> list[str]:
    """Return a title for each checkpoint: the run's name, or the path if names repeat. A single checkpoint is ``trained``."""
    if len(checkpoints) == 1:
        return ["trained"]
    paths = [Path(checkpoint).absolute() for checkpoint in checkpoints]
    names = [path.parents[1].name if path.parent.name == "checkpoints" else path.name for path in paths]
    # The output also has these keys, so a run of such a name would replace one of them, or be replaced.
    taken = {"model", "checkpoint", "untrained", "chance"}
    return names if len({*names} - taken) == len(names) else list(checkpoints)


def main(argv: list[str]) -> None:
    """Score the checkpoints, a model with random weights, or both; print the table."""
    args = _parser().parse_args(argv)
    add_model_configs()
    samples = read_samples(args.data_dir)
    options: dict[str, Any] = {"device": torch.device(args.device), "workers": 0}
    columns = {}
    for checkpoint, title in zip(args.checkpoint, _titles(args.checkpoint), strict=True):
        columns[title] = score(open_model(checkpoint, args.model).encoder(**options), samples)
    if args.untrained or not args.checkpoint:
        torch.manual_seed(0)
        with command_line.without_warnings():
            model, _, transform = open_clip.create_model_and_transforms(args.model, device=args.device)
        untrained = Encoder(model.eval(), transform, open_clip.get_tokenizer(args.model), **options)
        columns["untrained"] = score(untrained, samples)
    columns["chance"] = chance(samples)
    print(format_table(columns))
    if args.json:
        content = {"model": args.model, "checkpoint": args.checkpoint, **columns}
        args.json.parent.mkdir(parents=True, exist_ok=True)
        write_text(args.json, json_lines.dumps(content, indent=1))


if __name__ == "__main__":
    command_line.run(main)
