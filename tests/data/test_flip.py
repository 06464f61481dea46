"""The flip that keeps caption and image together: words, pixels, and their dependence on (seed, epoch, index) alone."""

import io

import pytest
import torch
from PIL import Image

from openclip_ext.data.build import build_train_loader
from openclip_ext.data.flip import exchange_sides
from openclip_ext.data.spec import DataSpec
from openclip_ext.data.train_loader import TrainLoaderConfig
from tests.data.shards import sample_members, write_shards

SAMPLES = 24


@pytest.mark.parametrize(
    ("caption", "expected"),
    [
        ("a cat left of a dog on the right", "a cat right of a dog on the left"),
        ("Left turn, RIGHT turn; the left-hand side.", "Right turn, LEFT turn; the right-hand side."),
        ("leftover copyright, upright and bright", "leftover copyright, upright and bright"),
        ("above the line", "above the line"),
        ("", ""),
    ],
)
def test_words_change_places(caption: str, expected: str) -> None:
    assert exchange_sides(caption) == expected
    assert exchange_sides(expected) == caption


def _members(number: int) -> list[tuple[str, bytes]]:
    """A sample without JPEG's loss: mirroring it twice is the same picture."""
    name, picture = sample_members(number, ["png"])[0]
    return [(name, picture), (f"{number:06d}.txt", f"{number} is left of it".encode())]


def _pixels(image: Image.Image) -> torch.Tensor:
    data = torch.frombuffer(
        bytearray(image.convert("RGB").resize((24, 24), Image.Resampling.NEAREST).tobytes()), dtype=torch.uint8
    )
    return data.view(24, 24, 3)


def _tokens(caption: str) -> torch.Tensor:
    return torch.tensor([[*caption.encode(), *[0] * (30 - len(caption))]])


def _epoch(
    shards: list[str], epoch: int = 0, workers: int = 0, flip: bool = True
) -> dict[int, tuple[torch.Tensor, str]]:
    spec = DataSpec(shards, image_key="png")
    config = TrainLoaderConfig(batch_size=4, workers=workers, seed=7, caption_aware_flip=flip)
    loader = build_train_loader(spec, config, preprocess=_pixels, tokenizer=_tokens)
    return {
        index: (image, bytes(tokens.tolist()).decode().rstrip("\0"))
        for batch in loader.iterate(epoch)
        for index, image, tokens in zip(batch["index"].tolist(), batch["image"], batch["text"], strict=True)
    }


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("flip")
    return write_shards(folder, [12, 12], {number: _members(number) for number in range(SAMPLES)})


def test_half_of_the_pairs_are_mirrored_as_a_whole(shards: list[str]) -> None:
    plain, flipped = _epoch(shards, flip=False), _epoch(shards)
    assert set(plain) == set(flipped) == set(range(SAMPLES))
    mirrored = 0
    for index, (image, caption) in flipped.items():
        original = _pixels(Image.open(io.BytesIO(_members(index)[0][1])))
        assert torch.equal(plain[index][0], original)
        assert plain[index][1] == f"{index} is left of it"
        if caption == plain[index][1]:
            assert torch.equal(image, original)
        else:
            assert caption == f"{index} is right of it"
            picture = Image.open(io.BytesIO(_members(index)[0][1])).transpose(Image.Transpose.FLIP_LEFT_RIGHT)
            assert torch.equal(image, _pixels(picture))
            mirrored += 1
    assert 4 <= mirrored <= SAMPLES - 4


def test_flips_depend_on_seed_epoch_and_index_alone(shards: list[str]) -> None:
    first, with_workers, next_epoch = _epoch(shards), _epoch(shards, workers=2), _epoch(shards, epoch=1)
    assert {index: caption for index, (_, caption) in first.items()} == {
        index: caption for index, (_, caption) in with_workers.items()
    }
    assert all(torch.equal(image, with_workers[index][0]) for index, (image, _) in first.items())
    assert any(caption != next_epoch[index][1] for index, (_, caption) in first.items())
