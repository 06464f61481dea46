"""Score image-text retrieval and WinoGAViL (choosing the images that belong to a cue).

As in DataComp, images of these data sets are not converted to RGB before OpenCLIP's transform. DataComp reads these sets with
the `datasets` library, but reads classification sets with webdataset, which converts images to RGB first.
"""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from openclip_ext.evaluation.classification import TaskResult
from openclip_ext.evaluation.data import DataError, SampleFormat, find_samples, read_instances
from openclip_ext.evaluation.features import Encoder
from openclip_ext.evaluation.metrics import Metrics
from openclip_ext.evaluation.ranks import ranks_of_best_match
from openclip_ext.evaluation.tasks import Task


def evaluate_retrieval(task: Task, folder: Path, encoder: Encoder, any_size: bool = False) -> TaskResult:
    """Compute the recall of image retrieval (by caption) and text retrieval (by image); raise DataError for faulty data."""
    spec = SampleFormat(captions=True, convert_first=False)
    found = encoder.embed_images(find_samples(folder), spec, task.folder, autocast=True)
    texts = encoder.encode_texts([caption for own in found.captions for caption in own])
    owners = torch.repeat_interleave(torch.tensor([len(own) for own in found.captions])).to(texts.device)
    return TaskResult.of_samples(retrieval_metrics(found.values["image"], texts, owners), found)


def retrieval_metrics(images: Tensor, texts: Tensor, owners: Tensor) -> Metrics:
    """Compute ``{image,text}_retrieval_recall@{1,5,10}`` and ``mean_recall@1``.

    ``images`` ``(N, d)`` and ``texts`` ``(M, d)`` are unit embeddings. ``owners`` ``(M,)`` contains the index of each
    caption's image. As in DataComp, only the captions of an image's own sample are right, even if another sample has an equal
    caption.
    """
    pairs = torch.stack([torch.arange(len(texts), device=owners.device), owners], dim=1)
    ranks = {
        "image": ranks_of_best_match(texts, images, pairs),
        "text": ranks_of_best_match(images, texts, pairs.flip(1)),
    }
    recalls = {f"{what}_retrieval_recall@{k}": float(ranks[what].hits(k).mean()) for k in (1, 5, 10) for what in ranks}
    mean = 0.5 * (recalls["image_retrieval_recall@1"] + recalls["text_retrieval_recall@1"])
    return {**recalls, "mean_recall@1": mean}


def evaluate_winogavil(task: Task, folder: Path, encoder: Encoder, any_size: bool = False) -> TaskResult:
    """Compute the mean Jaccard index between the k images nearest to a cue and the k images associated with it.

    k is the number of images associated with the cue. An instance is skipped if one of its images does not decode.
    """
    samples = find_samples(folder)
    instances = read_instances(folder, {sample.key for sample in samples})
    found = encoder.embed_images(samples, SampleFormat(convert_first=False), task.folder, autocast=True)
    images, rows = found.values["image"], {key: row for row, key in enumerate(found.keys)}
    usable = [instance for instance in instances if rows.keys() >= {*instance.candidates}]
    uses = Counter(key for instance in instances for key in {*instance.candidates})
    skipped = [f"{message}; {uses[key]} of {len(instances)} instances use it" for key, message in found.skipped.items()]
    if not usable:
        raise DataError(f"No instance in {task.folder} has all its images; {skipped[0]}.")
    words = [instance.cue.lower() for instance in usable]
    cues = encoder.encode_texts([f"{'An' if cue[0] in 'aeiou' else 'A'} {cue}" for cue in words])
    scores = []
    for instance, cue in zip(usable, cues, strict=True):
        similarities = (images[[rows[key] for key in instance.candidates]] @ cue).cpu().numpy()
        nearest = np.argsort(-similarities, kind="stable")[: len(instance.associations)]
        chosen, right = {instance.candidates[place] for place in nearest}, instance.associations
        scores.append(len(chosen & right) / len(chosen | right))
    metrics = winogavil_metrics(scores, [len(instance.candidates) for instance in usable])
    return TaskResult(metrics, len(usable), len(instances), skipped, images=len(samples))


def winogavil_metrics(scores: Sequence[float], candidates: Sequence[int]) -> Metrics:
    """Average the Jaccard index over all instances, and by number of candidates. A mean over no instances is None."""
    values, counts = np.asarray(scores), np.asarray(candidates)
    chosen: dict[str, np.ndarray] = {
        "avg_jaccard_score": np.full(len(values), True),
        **{f"jaccard_score_{count}": np.equal(counts, count) for count in (5, 6, 10, 12)},
        "jaccard_score_5-6": np.less_equal(counts, 6),
        "jaccard_score_10-12": np.greater_equal(counts, 10),
    }
    return {name: float(values[which].mean()) if which.any() else None for name, which in chosen.items()}
