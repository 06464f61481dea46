"""Write small data sets in DataComp's format for every kind of task, and a tiny OpenCLIP model.

The images are the handwritten digits of scikit-learn, which are available without a network.
"""

import io
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from sklearn.datasets import load_digits

from openclip_ext.evaluation.tasks import TASKS
from tests.data.shards import write_tar

TINY_MODEL = "tiny-vit-32"
DIGIT_NAMES = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
TEMPLATES = ("a photo of the number {c}.", "a handwritten {c}", "the digit {c}, black and white")
IMAGE_FORMATS = (("png", "PNG"), ("webp", "WEBP"), ("jpg", "JPEG"), ("jpeg", "JPEG"))

# Class names of FairFace and UTKFace, each after the question to which it belongs. In `toxic`, DataComp counts the classes 14
# to 17 as non-human and all later classes as crime-related. The first 14 classes are therefore people.
FACE_CLASSES = (
    *(f"race:{name}" for name in ("black", "white", "indian", "latino", "middle eastern", "southeast", "east asian")),
    *(f"gender:{name}" for name in ("male", "female")),
    *(f"age:{years}" for years in ("0-2", "3-9", "10-19", "20-29", "30-39", "40-49", "50-59", "60-69", "more than 70")),
    *(f"toxic:person {number}" for number in range(14)),
    *(f"toxic:{name}" for name in ("animal", "gorilla", "chimpanzee", "orangutan", "thief", "criminal", "suspicious")),
)
FACE_TEMPLATES = tuple(f"{label}:a photo of a {{c}} person" for label in ("race", "gender", "age", "toxic"))

Sample = tuple[str, dict[str, bytes]]


def digit_images(count: int, seed: int = 0) -> tuple[list[Image.Image], list[int]]:
    """Return ``count`` different digit images (RGB, 32x32 pixels) and their labels."""
    digits = load_digits()
    chosen = np.random.default_rng(seed).permutation(len(digits.target))[:count]
    images = [
        Image.fromarray((digits.images[index] * (255 / 16)).astype(np.uint8)).convert("RGB").resize((32, 32))
        for index in chosen
    ]
    return images, [int(digits.target[index]) for index in chosen]


def image_bytes(image: Image.Image, file_format: str = "PNG") -> bytes:
    """Encode an image, and return the bytes of the image file."""
    stream = io.BytesIO()
    image.save(stream, file_format)
    return stream.getvalue()


def npy_bytes(values: Sequence[int]) -> bytes:
    """Return integers as the bytes of a ``.npy`` file with a one-dimensional int64 array."""
    stream = io.BytesIO()
    np.save(stream, np.array(values, dtype=np.int64))
    return stream.getvalue()


def write_shard(path: Path, samples: Sequence[Sample]) -> None:
    """Write a shard that contains a file ``key.extension`` for each field of each sample."""
    write_tar(path, [(f"{key}.{name}", content) for key, fields in samples for name, content in fields.items()])


def write_dataset(folder: Path, samples: Sequence[Sample], shards: int = 2, **texts: Sequence[str]) -> Path:
    """Write a data set folder: shards ``test/0.tar``, ..., ``test/nshards.txt``, and one text file per keyword argument."""
    for shard in range(shards):
        write_shard(folder / "test" / f"{shard}.tar", samples[shard::shards])
    (folder / "test" / "nshards.txt").write_text(f"{shards}\n")
    for name, lines in texts.items():
        (folder / f"{name}.txt").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return folder


def write_class_folders(folder: Path, count: int, class_of: Callable[[int], str], seed: int = 0) -> list[str]:
    """Write digits as PNG files into one folder per class; return the class of each digit."""
    images, labels = digit_images(count, seed)
    classes = [class_of(label) for label in labels]
    for number, (image, name) in enumerate(zip(images, classes, strict=True)):
        (folder / name).mkdir(parents=True, exist_ok=True)
        image.save(folder / name / f"{number}.png")
    return classes


def labelled_samples(count: int, columns: Sequence[Sequence[int]] = (), seed: int = 0) -> list[Sample]:
    """Return digits in all image formats, with a label (``cls``) and an ``npy`` array of the values in ``columns``."""
    images, labels = digit_images(count, seed)
    samples = []
    for index, (image, label) in enumerate(zip(images, labels, strict=True)):
        extension, file_format = IMAGE_FORMATS[index % len(IMAGE_FORMATS)]
        fields = {extension: image_bytes(image, file_format), "cls": str(label).encode()}
        if columns:
            fields["npy"] = npy_bytes([column[index] for column in columns])
        samples.append((f"s{index:07d}", fields))
    return samples


def make_task(data_dir: Path, key: str, count: int = 24, images: int = 30, shards: int = 2, seed: int = 0) -> Path:
    """Write a small data set for any of the 40 tasks.

    ``count`` is the number of images, but in WinoGAViL of instances, whose 5, 6, 10 or 12 candidates come from ``images``
    images. In retrieval, each image has one to three captions, and no caption occurs twice.
    """
    task, generator = TASKS[key], np.random.default_rng(seed + 1)
    folder = data_dir / task.folder
    pictures, labels = digit_images(images if task.kind == "winogavil" else count, seed)
    samples = [(f"s{index:07d}", {"jpg": image_bytes(image, "JPEG")}) for index, image in enumerate(pictures)]
    if task.kind == "retrieval":
        for index, (label, (_, fields)) in enumerate(zip(labels, samples, strict=True)):
            captions = [f"{DIGIT_NAMES[label]} number {index} take {take}" for take in range(1 + index % 3)]
            fields["txt"] = "\n".join(captions).encode()
        return write_dataset(folder, samples, shards, dataset_type=("retrieval",))
    if task.kind == "winogavil":
        write_dataset(folder, samples, shards, dataset_type=("winogavil",))
        with open(folder / "instances.jsonl", "w", encoding="utf-8") as stream:
            for index in range(count):
                candidates = [samples[i][0] for i in generator.permutation(images)[: (5, 6, 10, 12)[index % 4]]]
                cue = ("Apple", "snow", "owl", "tree")[index // 4 % 4]
                line = {"cue": cue, "candidates": candidates, "associations": sorted(candidates)[: 2 + index % 3]}
                stream.write(json.dumps(line) + "\n")
        return folder
    if task.kind == "faces":
        race = generator.integers(0, 7, count)
        age, gender = generator.integers(0, 9, count), generator.integers(0, 2, count)
        samples = labelled_samples(count, (age, gender, race, (race != 1).astype(np.int64)), seed)
        for _, fields in samples:
            fields.pop("cls")
        classes, templates = FACE_CLASSES, FACE_TEMPLATES
    else:
        # Group 1 has no samples, to test that an empty group does not count as the worst group.
        columns = [generator.choice([0, 2, 3, 4, 5], count).tolist() for _ in task.metadata]
        samples, classes, templates = labelled_samples(count, columns, seed), DIGIT_NAMES, TEMPLATES
    return write_dataset(folder, samples, shards, classnames=classes, zeroshot_classification_templates=templates)


def tiny_model_config(
    folder: Path, name: str = TINY_MODEL, width: int = 32, text: Mapping[str, Any] | None = None, **vision: Any
) -> Path:
    """Write the JSON configuration of a tiny OpenCLIP model (image size 32); return the path of the file."""
    config = {
        "embed_dim": 16,
        "vision_cfg": {"image_size": 32, "layers": 2, "width": width, "patch_size": 8, "head_width": 16, **vision},
        "text_cfg": {
            "context_length": 24,
            "vocab_size": 49408,
            "width": width,
            "heads": 2,
            "layers": 2,
            **(text or {}),
        },
    }
    path = folder / f"{name}.json"
    path.write_text(json.dumps(config))
    return path


def tiny_checkpoint(folder: Path, name: str = TINY_MODEL, seed: int = 2, file_name: str = "epoch_1.pt") -> Path:
    """Register the tiny model, and write a checkpoint of random weights in OpenCLIP's format; return its path."""
    import open_clip

    open_clip.add_model_config(tiny_model_config(folder, name))
    torch.manual_seed(seed)
    model = open_clip.create_model(name)
    # OpenCLIP's initial weights are so small that all embeddings would be nearly equal. Larger weights separate them.
    for parameter in model.parameters():
        if parameter.ndim == 2:
            parameter.data *= 3
    torch.nn.init.normal_(model.token_embedding.weight)
    torch.nn.init.normal_(model.positional_embedding, std=0.1)
    torch.nn.init.normal_(model.visual.conv1.weight, std=3)
    torch.nn.init.zeros_(model.visual.class_embedding)
    path = folder / file_name
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save({"epoch": 1, "name": "tiny", "state_dict": model.state_dict()}, path)
    return path
