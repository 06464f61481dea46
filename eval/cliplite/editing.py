"""Remove a concept, which pairs of words define, from image embeddings: ``python -m eval.cliplite.editing``.

Source: CLIP-Lite, section 4.8. The two prompts of a pair differ only in the concept ("I am a boy.", "I am a girl."). The two
embeddings of each pair are shifted to mean zero (Bolukbasi et al., 2016). The principal components of all shifted embeddings
span the concept's subspace. To remove the concept, an image embedding's projection onto the subspace is subtracted from the
embedding. The alignment table (Table 6 of the paper) shows how well the best images of two groups match the prompts of each
side, before and after the removal. If both groups have equal values after the removal, the concept is removed.
"""

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from openclip_ext.cli import command_line
from openclip_ext.cli.messages import echo
from openclip_ext.evaluation.command_line import add_model_arguments, load_encoder
from openclip_ext.evaluation.samples import file_samples, image_files, read_lines
from openclip_ext.files import json_lines
from openclip_ext.files.writing import output_path, write_text
from openclip_ext.pages.rendering import markdown_table, render_page, thumbnail

# Pairs for the paper's concept, gender. The paper gives the first two pairs and the first template as examples.
PAIRS = (
    ("man", "woman"), ("son", "daughter"), ("boy", "girl"), ("father", "mother"), ("brother", "sister"),
    ("husband", "wife"), ("gentleman", "lady"), ("nephew", "niece"), ("king", "queen"), ("waiter", "waitress"),
)  # fmt: skip
TEMPLATES = ("I am a {c}.", "a photo of a {c}.", "this person is a {c}.")

# Number of nearest images per query on the HTML page, as in the paper's Figure 5, and their maximum size in pixels.
_NEAREST, _PIXELS = 5, 112

# Side of the prompts -> group of images -> mean alignment before ("original") and after the removal ("neutral"), and their
# difference ("delta").
AlignmentTable = dict[str, dict[str, dict[str, float]]]


def concept_subspace(first: Tensor, second: Tensor, components: int = 1) -> tuple[Tensor, Tensor]:
    """Find the ``components`` directions in which the embeddings ``(n, d)`` of the first and second prompts differ most.

    Returns:
        A basis ``(components, d)`` with orthonormal rows that point from ``second`` to ``first``, and the fraction
        ``(components,)`` of the pairs' variance in each direction.
    """
    if not 1 <= components <= min(first.shape):
        raise ValueError(f"expected 1 to {min(first.shape)} --components, found {components}")
    # A pair (a, b) with mean m is shifted to a - m and b - m, which are +-(a - b) / 2. So the principal components of all
    # shifted embeddings are the right singular vectors of the half differences.
    differences = (first.double() - second.double()) / 2
    _, values, vectors = torch.linalg.svd(differences, full_matrices=False)
    variance = values.square()
    if not variance.sum() > 0:
        raise ValueError(
            "both prompts of every pair have equal embeddings: give --pairs of words that differ in a concept"
        )
    basis = vectors[:components]
    signs = torch.sign(basis @ differences.mean(0))
    basis = basis * torch.where(signs == 0, 1.0, signs).unsqueeze(1)
    return basis.to(first.dtype), (variance / variance.sum())[:components].to(first.dtype)


def remove(features: Tensor, basis: Tensor) -> Tensor:
    """Return features ``(n, d)`` without the concept: ``h - sum_j <h, v_j> v_j``. The result is not normalized."""
    return features - features @ basis.T @ basis


def alignment_table(
    queries: Mapping[str, Tensor], images: Mapping[str, Tensor], basis: Tensor, top: int = 10
) -> AlignmentTable:
    """Compute Table 6 of CLIP-Lite: the mean alignment of each query with its ``top`` best images, averaged over queries.

    ``queries`` maps each side to the unit embeddings of its prompts ``(q, d)``, and ``images`` maps each group to the unit
    embeddings of its images ``(n, d)``.
    """

    def mean_of_best(prompts: Tensor, features: Tensor) -> float:
        return float((prompts @ features.T).topk(top, dim=1).values.mean())

    table: AlignmentTable = {side: {} for side in queries}
    for group, features in images.items():
        if len(features) < top:
            raise ValueError(f"group {group} has {len(features)} images, but --top is {top}")
        for side, prompts in queries.items():
            original, neutral = mean_of_best(prompts, features), mean_of_best(prompts, remove(features, basis))
            table[side][group] = {"original": original, "neutral": neutral, "delta": original - neutral}
    return table


def nearest_images(
    query: Tensor, groups: Mapping[str, tuple[Tensor, Sequence[str]]], basis: Tensor
) -> dict[str, list[tuple[str, float]]]:
    """Find each group's five images nearest to a query, before and after the removal, as in CLIP-Lite's Figure 5.

    ``groups`` maps names to unit embeddings ``(n, d)`` and paths. The result lists paths and alignments, nearest first.
    """
    rows = {}
    for removed in (False, True):
        for group, (features, files) in groups.items():
            alignment = (remove(features, basis) if removed else features) @ query
            best, places = (found.tolist() for found in alignment.topk(min(_NEAREST, len(files))))
            title = f"{group}, concept removed" if removed else group
            rows[title] = [(files[place], value) for place, value in zip(places, best, strict=True)]
    return rows


def picture(path: str) -> str:
    """Return a small image for the page."""
    return thumbnail(Image.open(path).convert("RGB"), _PIXELS)


def alignment_rows(table: AlignmentTable) -> list[list[str]]:
    """Return the cells of the alignment table: one row per side, and three columns per group."""
    columns = {"original": ".4f", "neutral": ".4f", "delta": "+.4f"}
    rows = [["queries", *(f"{group}: {column}" for group in next(iter(table.values())) for column in columns)]]
    for side, row in table.items():
        rows.append([side, *(f"{entry[name]:{style}}" for entry in row.values() for name, style in columns.items())])
    return rows


def read_pairs(path: Path) -> list[tuple[str, str]]:
    """Read pairs of words or phrases from a file with one comma-separated pair per line."""
    pairs = [[word.strip() for word in line.split(",")] for line in read_lines(path, "pairs")]
    if not all(len(pair) == 2 and all(pair) for pair in pairs):
        raise ValueError(
            f"{path} has lines that are not pairs: expected two words or phrases per line, separated by a comma"
        )
    return [(first, second) for first, second in pairs]


def build_parser() -> argparse.ArgumentParser:
    parser = command_line.Parser(
        prog=f"python -m {__package__}.editing",
        description="Remove a concept, which pairs of words define, from image embeddings, and print the alignment "
        "table (CLIP-Lite, section 4.8). Without --pairs, the concept is gender, as in the paper.",
    )
    add_model_arguments(parser)
    sides = ("FIRST", "SECOND")
    parser.add_argument("--images", nargs=2, type=Path, required=True, metavar=sides, help="folders of the two groups")
    parser.add_argument("--names", nargs=2, metavar=sides, help="names of the two groups (default: folder names)")
    parser.add_argument("--pairs", type=Path, help="file with one pair of words per line: FIRST, SECOND")
    parser.add_argument("--templates", type=Path, help="file with one prompt per line; {c} stands for the word")
    parser.add_argument(
        "--components", type=int, default=1, help="number of directions to remove (default: %(default)s)"
    )
    parser.add_argument("--top", type=int, default=10, help="number of best images per query (default: %(default)s)")
    parser.add_argument("--output-dir", type=output_path, default=Path("editing"), help="default: %(default)s")
    return parser


def main(argv: list[str]) -> None:
    """Write ``editing.json``, ``editing.md``, ``nearest.html`` and ``subspace.npy`` ``(k, d)``; print the table."""
    args = build_parser().parse_args(argv)
    names = args.names or [folder.name for folder in args.images]
    if names[0] == names[1]:
        raise ValueError(f"both groups have the name {names[0]}: give two different names with --names")
    pairs = read_pairs(args.pairs) if args.pairs else PAIRS
    templates = read_lines(args.templates, "prompts") if args.templates else TEMPLATES
    if not all("{c}" in template for template in templates):
        raise ValueError("every prompt of --templates needs a {c} for the word")
    opened, encoder = load_encoder(args)
    prompts = [[template.format(c=pair[side]) for template in templates for pair in pairs] for side in (0, 1)]
    first, second = (encoder.encode_texts(texts).cpu() for texts in prompts)
    basis, explained = concept_subspace(first, second, args.components)
    groups = {}
    for name, folder in zip(names, args.images, strict=True):
        found = encoder.embed_images(file_samples(name, image_files(folder)))
        groups[name] = found.values["image"].cpu(), found.keys
    images = {name: features for name, (features, _) in groups.items()}
    # As in the paper, each pair has one query per side: the prompt of the first template.
    queries = {name: side[: len(pairs)] for name, side in zip(names, (first, second), strict=True)}
    table = alignment_table(queries, images, basis, args.top)
    report = {
        **opened.origin,
        "pairs": len(pairs),
        "templates": len(templates),
        "explained_variance": explained.tolist(),
        "images": {name: len(features) for name, features in images.items()},
        "top": args.top,
        "alignment": table,
    }
    nearest = {}
    for texts, embeddings in zip(prompts, queries.values(), strict=True):
        for prompt, query in zip(texts, embeddings, strict=False):
            nearest[prompt] = nearest_images(query, groups, basis)
    text = markdown_table(alignment_rows(table))
    args.output_dir.mkdir(parents=True, exist_ok=True)
    page = render_page("nearest.html", "Nearest images", queries=nearest, picture=picture)
    write_text(args.output_dir / "nearest.html", page)
    write_text(args.output_dir / "editing.json", json_lines.dumps(report, indent=2) + "\n")
    write_text(args.output_dir / "editing.md", text + "\n")
    np.save(args.output_dir / "subspace.npy", basis.numpy())
    shares = ", ".join(f"{share:.1%}" for share in explained.tolist())
    echo(f"{text}\n\nShare of the pairs' variance in the removed directions: {shares}\nWritten: {args.output_dir}")


if __name__ == "__main__":
    command_line.run(main)
