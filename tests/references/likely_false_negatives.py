"""Naive reference of a guide: samples that compare as equal if the reference model finds them alike, as caption labels."""

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch import Tensor


@dataclass(eq=False)
class Sample:
    """A sample with the reference model's embeddings and the caption's label. Without a label, captions are not compared."""

    image: Tensor
    text: Tensor
    label: int | None
    margin: float

    def __eq__(self, other: object) -> bool:
        assert isinstance(other, Sample)
        if self is other or (self.label is not None and self.label == other.label):
            return True
        if not all(of.image.any() and of.text.any() for of in (self, other)):
            return False
        closest = max(self.image @ other.text, other.image @ self.text)
        return bool(closest > max(self.image @ self.text, other.image @ other.text) - self.margin)


def samples(
    tables: Sequence[Tensor], index: Iterable[int], unread: Iterable[int], labels: Sequence[int] | None, margin: float
) -> list[Sample]:
    """Return the samples of a batch, whose embeddings are in the rows ``index`` of ``tables``."""
    images, texts = tables
    missing = set(unread)
    return [
        Sample(images[row] * (row not in missing), texts[row] * (row not in missing), label, margin)
        for row, label in zip(index, labels or itertools.repeat(None), strict=False)
    ]
