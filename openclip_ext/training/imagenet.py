"""Zero-shot classification of ImageNet and ImageNet-V2 (``--imagenet-val``, ``--imagenet-v2``).

The classifier, the arithmetic and the names of the metrics are OpenCLIP's. Its own script stops with numpy 2.4 and later
(``TypeError: only 0-dimensional arrays``), and needs a package that is not on PyPI to read ImageNet-V2.
"""

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import open_clip
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchvision.datasets import ImageFolder

from openclip_ext.copies import on_device
from openclip_ext.machine import begin_worker
from openclip_ext.training.errors import UsageError
from openclip_ext.training.step import StepSettings

TOP_K = (1, 5)
_CLASSES = 1000
# Where the images are in the folder of --imagenet-v2: moved there by OpenCLIP's reader, or as unpacked from the archive.
_V2_FOLDERS = ("ImageNetV2-matched-frequency", "imagenetv2-matched-frequency-format-val")


class ClassFolders(ImageFolder):
    """Images in one folder for each class of ImageNet.

    Folders named by numbers (``0`` to ``999``, as in ImageNet-V2) are the classes with these numbers. Other names
    (``n01440764``, ...) are numbered in sorted order, so all 1000 must be there.
    """

    def find_classes(self, directory: str | Path) -> tuple[list[str], dict[str, int]]:
        names, numbers = super().find_classes(directory)
        if all(name.isdecimal() for name in names):
            numbers = {name: int(name) for name in names}
            if max(numbers.values()) >= _CLASSES:
                raise ValueError(
                    f"{directory}: expected class folders 0 to {_CLASSES - 1}, found {max(numbers.values())}"
                )
        elif len(names) != _CLASSES:
            logging.warning(
                f"{directory} has {len(names)} class folders, ImageNet has {_CLASSES}: they are numbered in sorted order, so "
                "the accuracy is wrong unless exactly the last classes are missing. Name the folders by the classes' numbers"
            )
        return names, numbers


def imagenet_loader(
    flag: str, folder: str, preprocess: Callable, batch_size: int, workers: int
) -> DataLoader[tuple[Tensor, Tensor]]:
    """Return batches of images and the numbers of their classes; ``flag`` names the folder's flag."""
    root = Path(folder)
    if flag == "--imagenet-v2":
        root = next((root / name for name in _V2_FOLDERS if (root / name).is_dir()), root)
    try:
        images = ClassFolders(root, transform=preprocess)
    except (OSError, ValueError) as error:
        raise UsageError(f"{flag} {folder}: expected a folder of images for each class ({error})") from error
    pin_memory = torch.cuda.is_initialized()
    return DataLoader(images, batch_size, num_workers=workers, worker_init_fn=begin_worker, pin_memory=pin_memory)


@dataclass(frozen=True)
class ImageNetZeroShot:
    """Zero-shot accuracy on ImageNet and ImageNet-V2, under OpenCLIP's names.

    Attributes:
        loaders: by the name in the metrics, ``imagenet`` or ``imagenetv2``.
    """

    loaders: Mapping[str, Iterable[tuple[Tensor, Tensor]]]
    tokenizer: Callable
    settings: StepSettings
    name: str = "imagenet-zero-shot"

    @torch.no_grad()
    def run(self, model: nn.Module) -> dict[str, float]:
        """Measure the model, which is in evaluation mode."""
        with self.settings.autocast():
            classifier = open_clip.build_zero_shot_classifier(
                model,
                tokenizer=self.tokenizer,
                classnames=open_clip.IMAGENET_CLASSNAMES,
                templates=open_clip.OPENAI_IMAGENET_TEMPLATES,
                num_classes_per_batch=10,
                device=self.settings.device,
            )
        metrics: dict[str, float] = {}
        for name, loader in self.loaders.items():
            correct, count = torch.zeros(len(TOP_K), dtype=torch.int64, device=self.settings.device), 0
            for images, labels in on_device(loader, self.settings.device):
                correct += self._correct(model, classifier, images, labels)
                count += len(images)
            shares = (correct.double() / count).tolist()
            metrics |= {f"{name}-zeroshot-val-top{k}": share for k, share in zip(TOP_K, shares, strict=True)}
        return metrics

    def _correct(self, model: nn.Module, classifier: Tensor, images: Tensor, labels: Tensor) -> Tensor:
        """Count the images whose class is among the first ``k``, for each of :data:`TOP_K`."""
        with self.settings.autocast():
            logits = 100.0 * model(image=images.to(dtype=self.settings.input_dtype))["image_features"] @ classifier
        found = logits.topk(max(TOP_K), dim=1).indices == labels[:, None]
        return torch.stack([found[:, :k].sum() for k in TOP_K])
