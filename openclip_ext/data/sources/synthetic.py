"""OpenCLIP's ``--dataset-type synthetic`` for timing: every sample has the same black image and the same caption."""

from PIL import Image

from openclip_ext.data.sources.source import DecodedImage, ImageDecoder, RawSample, Source

CAPTION = "Dummy caption"
_SIZE = 224


class SyntheticSource(Source):
    """A source that repeats one sample ``num_samples`` times."""

    def __init__(self, num_samples: int) -> None:
        super().__init__(num_samples, f"synthetic-{num_samples}")
        self._image = Image.new("RGB", (_SIZE, _SIZE))

    def decode(self, raw: RawSample, decoder: ImageDecoder, draw: int = 0) -> tuple[DecodedImage, str]:
        return self._image, CAPTION

    def group_of(self, index: int) -> tuple[str, int, int]:
        return "synthetic", 0, self.num_samples
