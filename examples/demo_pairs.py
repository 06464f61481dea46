"""The examples' data and model: captioned images of the demo data set, in memory, and the demo model."""

import io

import open_clip
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset

from openclip_ext.data.shapes.write import make_sample
from openclip_ext.evaluation.ranks import retrieval_metrics
from openclip_ext.model_configs import add_model_configs

MODEL = "demo-vit"
CONTEXT_LENGTH = 20
BATCH = 64


class Shapes(Dataset):
    """A data set of samples ``{"image": (3, 32, 32), "text": (20,)}`` from the demo data set; ``text`` contains tokens."""

    def __init__(self, split: str, num_samples: int) -> None:
        *_, preprocess = create_model()
        tokenizer = open_clip.get_tokenizer(MODEL)
        samples = [make_sample(seed=0, split=split, index=index) for index in range(num_samples)]
        self.images = torch.stack([preprocess(Image.open(io.BytesIO(sample.png))) for sample in samples])
        self.texts = tokenizer([sample.txt.decode() for sample in samples])

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, position: int) -> dict[str, Tensor]:
        return {"image": self.images[position], "text": self.texts[position]}


def create_model() -> tuple:
    """Return the demo model and its image transforms; every call returns the same random weights."""
    add_model_configs()
    torch.manual_seed(0)
    return open_clip.create_model_and_transforms(MODEL, output_dict=True)


def print_recall(images: Tensor, texts: Tensor) -> None:
    """Print the recall at 1 among n pairs of unit-norm features ``(n, d)``."""
    metrics = retrieval_metrics(images, texts)
    print(
        f"R@1 among {len(images)} unseen pairs: image to text {metrics['image_to_text_R@1']:.3f}, "
        f"text to image {metrics['text_to_image_R@1']:.3f} (chance {1 / len(images):.3f})"
    )
