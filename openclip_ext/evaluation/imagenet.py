"""Score zero-shot classification on ImageNet and ImageNet-V2 (``--imagenet-val``, ``--imagenet-v2``).

The classifier, the computation and the metric names are the same as in OpenCLIP. OpenCLIP's own script is not used, because it
fails with numpy 2.4 and later (``TypeError: only 0-dimensional arrays``), and needs an ImageNet-V2 reader that is not on PyPI.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import open_clip
import torch
from PIL import Image
from timm.data import ImageNetInfo
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchvision.datasets import ImageFolder
from torchvision.datasets.folder import IMG_EXTENSIONS, default_loader

from openclip_ext import compat
from openclip_ext.cli.errors import UsageError
from openclip_ext.data.processes import begin_worker

TOP_K = (1, 5)
# Possible names of the image folder inside --imagenet-v2: the name of OpenCLIP's reader, and the name in the archive.
_V2_FOLDERS = ("ImageNetV2-matched-frequency", "imagenetv2-matched-frequency-format-val")


def _load(path: str) -> Image.Image:
    try:
        return default_loader(path)
    except Exception as error:  # Pillow's errors do not name the file
        raise OSError(f"{path}: the image does not decode ({error})") from error


class ClassFolders(ImageFolder):
    """Images in one folder per class. Files and folders whose names start with a dot are skipped at any depth."""

    def __init__(self, root: str | Path, transform: Callable | None = None) -> None:
        super().__init__(root, transform, loader=_load, is_valid_file=lambda path: self._is_image(Path(path)))

    def find_classes(self, directory: str | Path) -> tuple[list[str], dict[str, int]]:
        names = [name for name in super().find_classes(directory)[0] if not name.startswith(".")]
        return names, {name: number for number, name in enumerate(names)}

    def _is_image(self, path: Path) -> bool:
        inside = path.relative_to(self.root).parts
        return path.suffix.lower() in IMG_EXTENSIONS and not any(part.startswith(".") for part in inside)


class ImageNetFolders(ClassFolders):
    """Images of ImageNet's 1000 classes. Folder names are WordNet ids (``n01440764``) or numbers (``0`` to ``999``)."""

    def find_classes(self, directory: str | Path) -> tuple[list[str], dict[str, int]]:
        names, _ = super().find_classes(directory)
        synsets = {name: number for number, name in enumerate(ImageNetInfo().label_names())}
        numbers = {name: int(name) if name.isdecimal() else synsets.get(name, -1) for name in names}
        if sorted(numbers.values()) != sorted(synsets.values()):
            others = [name for name, number in numbers.items() if number not in synsets.values()] or names
            found = f"{len(names)} class folders, {others[0]} among them"
            raise ValueError(f"expected ImageNet's 1000 class folders (n01440764, ... or 0 to 999), found {found}")
        return names, numbers


def imagenet_loader(
    flag: str, folder: str, preprocess: Callable, batch_size: int, workers: int
) -> DataLoader[tuple[Tensor, Tensor]]:
    """Return batches of images and class numbers. ``flag`` is the user's flag for the folder; error messages contain it."""
    root = Path(folder)
    if flag == "--imagenet-v2":
        root = next((root / name for name in _V2_FOLDERS if (root / name).is_dir()), root)
    try:
        images = ImageNetFolders(root, preprocess)
    except (OSError, ValueError) as error:
        raise UsageError(f"{flag} {folder}: expected a folder of images for each class ({error})") from error
    pin_memory = torch.cuda.is_initialized()
    return DataLoader(images, batch_size, num_workers=workers, worker_init_fn=begin_worker, pin_memory=pin_memory)


def top_name(data: str, k: int) -> str:
    """Return OpenCLIP's name of the top-k accuracy on ``imagenet`` or ``imagenetv2``."""
    return f"{data}-zeroshot-val-top{k}"


@dataclass(frozen=True)
class ImageNetZeroShot:
    """Evaluator of the zero-shot accuracy on ImageNet and ImageNet-V2, with OpenCLIP's metric names.

    Attributes:
        loaders: Loaders by prefix of the metric names (``imagenet`` or ``imagenetv2``).
    """

    loaders: Mapping[str, Iterable[tuple[Tensor, Tensor]]]
    tokenizer: Callable
    device: torch.device
    precision: str = "fp32"
    name: str = "imagenet-zero-shot"

    @torch.no_grad()
    def run(self, model: nn.Module) -> dict[str, float]:
        """Return the top-1 and top-5 accuracies by metric name. The model must be in evaluation mode."""
        autocast = compat.autocast_context(self.precision, self.device)
        input_dtype = open_clip.get_input_dtype(self.precision)
        with autocast():
            classifier = open_clip.build_zero_shot_classifier(
                model,
                tokenizer=self.tokenizer,
                classnames=open_clip.IMAGENET_CLASSNAMES,
                templates=open_clip.OPENAI_IMAGENET_TEMPLATES,
                num_classes_per_batch=10,
                device=self.device,
            )
        metrics: dict[str, float] = {}
        for name, loader in self.loaders.items():
            correct, count = torch.zeros(len(TOP_K), dtype=torch.int64, device=self.device), 0
            for images, labels in loader:
                with autocast():
                    features = model(image=images.to(self.device).to(input_dtype))["image_features"]
                    logits = 100.0 * features @ classifier
                found = logits.topk(max(TOP_K), dim=1).indices == labels.to(self.device)[:, None]
                correct += torch.stack([found[:, :k].sum() for k in TOP_K])
                count += len(images)
            shares = (correct.double() / count).tolist()
            metrics |= {top_name(name, k): share for k, share in zip(TOP_K, shares, strict=True)}
        return metrics
