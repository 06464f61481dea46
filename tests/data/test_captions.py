"""Captions: swap left and right for mirrored images, sample one of several captions per epoch, and hash captions."""

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps

from openclip_ext.data.flip import exchange_sides
from openclip_ext.data.hashing import hash_text
from openclip_ext.data.loader.build import build_source
from openclip_ext.data.loader.eval_loader import EvalLoader
from openclip_ext.data.sources.source import BadSampleError, RawSample, SampleKeys, decode_image
from openclip_ext.data.sources.spec import DataSpec
from tests.data.loading import build, indices, rest_of
from tests.data.shards import image_bytes, sample_members, write_csv, write_shards

SAMPLES, OTHERS = 24, 5
SEVERAL = {"caption_key": "txt;json:captions", "draw_captions": True}


def captions_of(number: int) -> list[str]:
    return [f"{number} is left of it", *(f"{number} in other words {other}" for other in range(OTHERS))]


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Return shards of PNG images (lossless, so mirrored pixels are exact). A sample has one text and five more captions."""
    members = {}
    for number in range(SAMPLES):
        first, *others = captions_of(number)
        text, more = first.encode(), json.dumps({"captions": others}).encode()
        members[number] = [*sample_members(number, ["png"]), (f"{number:06d}.txt", text), (f"{number:06d}.json", more)]
    return write_shards(tmp_path_factory.mktemp("captions"), [12, 12], members)


def pixels(image: Image.Image) -> torch.Tensor:
    return torch.from_numpy(np.array(image.resize((24, 24), Image.Resampling.NEAREST)))


def tokens(captions: list[str]) -> torch.Tensor:
    return torch.tensor([[*caption.encode().ljust(40, b"\0")] for caption in captions])


def samples_of(shards: list[str], epoch: int = 0, skip: int = 0, **options: Any) -> dict[int, tuple[str, list]]:
    """Map the sample indices of an epoch, without its first ``skip`` batches, to captions and pixels."""
    loader = build(shards, preprocess=pixels, tokenizer=tokens, **{"seed": 3} | options)
    return {
        index: (bytes(text).decode().rstrip("\0"), image)
        for batch in rest_of(loader, epoch, skip)
        for index, text, image in zip(*(batch[name].tolist() for name in ("index", "text", "image")), strict=True)
    }


def test_hard_negatives_are_drawn_and_a_sample_without_one_is_bad(shards: list[str], tmp_path: Path):
    """The field "json:captions" has five texts for each sample. Here they are its hard negatives."""
    loader = build(shards, preprocess=pixels, tokenizer=tokens, seed=3, hard_negative_key="json:captions")
    drawn = []
    for epoch in (0, 1):
        batches = list(loader.iterate(epoch))
        for batch in batches:
            texts = [
                [bytes(row).decode().rstrip("\0") for row in batch[name].tolist()] for name in ("text", "hard_negative")
            ]
            for index, caption, negative in zip(batch["index"].tolist(), *texts, strict=True):
                assert caption == captions_of(index)[0] and negative in captions_of(index)[1:]
                drawn.append((index, negative))
        assert len(drawn) == SAMPLES * (epoch + 1)
        again = [batch["hard_negative"] for batch in loader.iterate(epoch)]
        assert all(torch.equal(a, batch["hard_negative"]) for a, batch in zip(again, batches, strict=True))
    assert SAMPLES < len(set(drawn)) < 2 * SAMPLES, "expected other draws in the second epoch"
    texts = {7: None, 9: ["", " "], 11: ["", "sample 5"]}
    members = {number: sample_members(number, ["jpg", "txt"]) for number in texts}
    for number in (9, 11):
        members[number].append((f"{number:06d}.json", json.dumps({"caption": texts[number]}).encode()))
    loader = build(write_shards(tmp_path, [40], members), hard_negative_key="json:caption")
    for epoch in range(3):  # of a list, an empty text is never drawn
        found = indices(list(loader.iterate(epoch)))
        assert {7, 9}.isdisjoint(found) and len(set(found)) >= 36
    assert loader.bad_counts() == (2, 0)
    with pytest.raises(
        BadSampleError, match="no hard negative: expected a text, or a list of texts, at 'nope' in json"
    ):
        SampleKeys("jpg", "txt", "json:nope").hard_negative(RawSample(0, {"json": b"{}"}), 0)
    with pytest.raises(ValueError, match="--caption-aware-flip: expected no --hard-negative-key"):
        build(shards, hard_negative_key="json:captions", caption_aware_flip=True)


def test_words_change_places():
    for caption, expected in (
        ("a cat left of a dog on the right", "a cat right of a dog on the left"),
        ("Left turn, RIGHT turn; the left-hand side.", "Right turn, LEFT turn; the right-hand side."),
        ("leftover copyright, upright and bright", "leftover copyright, upright and bright"),
    ):
        assert exchange_sides(caption) == expected
        assert exchange_sides(expected) == caption


def test_half_of_the_pairs_are_mirrored_as_a_whole(shards: list[str]):
    mirrored = 0
    for index, (caption, image) in samples_of(shards, caption_aware_flip=True).items():
        original = decode_image(image_bytes(index, image_format="PNG"))
        if caption == f"{index} is right of it":
            original = ImageOps.mirror(original)
            mirrored += 1
        else:
            assert caption == f"{index} is left of it"
        assert image == pixels(original).tolist()
    assert 4 <= mirrored <= SAMPLES - 4


SENTENCES = ["A red mug.", "It costs 3.50, or less!", "新しい。", "Is it new?"]


@pytest.mark.parametrize("kind", ["shards", "csv"])
def test_sentences_are_drawn_by_seed_epoch_and_index(kind, tmp_path):
    text = "A red mug. It costs 3.50, or less!\n新しい。Is it new?"
    members = {number: [*sample_members(number, ["png"]), (f"{number:06d}.txt", text.encode())] for number in range(8)}
    write_shards(tmp_path, [8], members)
    data: Any = [str(path) for path in tmp_path.glob("*.tar")]
    if kind == "csv":
        data = write_csv(tmp_path, rows=8)
        rows = [[f"{tmp_path}/{number}.jpg", text] for number in range(8)]
        with data.open("w", newline="") as file:
            csv.writer(file, delimiter="\t").writerows([["filepath", "title"], *rows])
    epochs = [
        {
            index: bytes(text).decode().rstrip("\0")
            for batch in build(data, preprocess=pixels, tokenizer=tokens, seed=3, draw_sentences=True).iterate(epoch)
            for index, text in zip(batch["index"].tolist(), batch["text"].tolist(), strict=True)
        }
        for epoch in (0, 1, 2, 2)
    ]
    assert {caption for epoch in epochs for caption in epoch.values()} == {*SENTENCES}
    assert epochs[2] == epochs[3] and epochs[1] != epochs[2]


def test_captions_depend_on_seed_epoch_and_index_alone(shards: list[str]):
    options = {"caption_aware_flip": True, **SEVERAL}
    whole = samples_of(shards, 1, **options)
    assert whole == samples_of(shards, 1, workers=1, batch_size=3, **options)
    rest = samples_of(shards, 1, skip=4, **options)
    assert len(rest) == SAMPLES - 16 and rest == {index: whole[index] for index in rest}
    assert whole != samples_of(shards, 1, **options, seed=4)
    assert whole != samples_of(shards, 2, **options)


def test_the_first_caption_counts_unless_one_of_all_is_drawn(shards: list[str]):
    for key, first in (("txt;json:captions", 0), ("json:captions", 1)):
        found = samples_of(shards, caption_key=key)
        assert {index: caption for index, (caption, _) in found.items()} == {
            number: captions_of(number)[first] for number in range(SAMPLES)
        }
    epochs = [samples_of(shards, epoch, **SEVERAL) for epoch in range(6)]
    drawn = [[captions_of(number).index(epoch[number][0]) for epoch in epochs] for number in range(SAMPLES)]
    assert all(len(set(places)) > 1 for places in drawn)
    assert {place for places in drawn for place in places} == set(range(1 + OTHERS))


def test_a_hash_is_of_what_the_caption_says_now(shards: list[str]):
    assert hash_text("a cat") == -6711169336525982361, "hash changed: it must be the same in every version"
    loader = build(shards, preprocess=pixels, tokenizer=tokens, caption_hash=True, caption_aware_flip=True)
    for batch in loader.iterate(0):
        said = [bytes(text).decode().rstrip("\0") for text in batch["text"].tolist()]
        assert batch["caption_hash"].dtype == torch.int64
        assert batch["caption_hash"].tolist() == [hash_text(caption) for caption in said]
    assert next(build(shards, preprocess=pixels, tokenizer=tokens).iterate(0)).keys() == {"image", "text", "index"}


@pytest.mark.parametrize("kind", ["shards", "csv"])
def test_equal_image_files_have_equal_hashes(kind: str, tmp_path: Path):
    """Sample i has the image of sample i % 5."""
    if kind == "csv":
        data = write_csv(tmp_path, rows=20)
        for row in range(20):
            (tmp_path / f"{row}.jpg").write_bytes(image_bytes(row % 5))
    else:
        files = {n: [(f"{n:06d}.jpg", image_bytes(n % 5)), *sample_members(n, ["txt"])] for n in range(20)}
        data = tmp_path / "00000.tar"
        write_shards(tmp_path, [20], files)
    settings = {"preprocess": pixels, "tokenizer": tokens}
    trained = [*build(str(data), caption_hash=True, **settings).iterate(0)]
    evaluated = [*EvalLoader(build_source(DataSpec(str(data))), **settings, batch_size=4)]
    hashes = {}
    for batch in trained + evaluated:
        hashes |= dict(zip(batch["index"].tolist(), batch["image_hash"].tolist(), strict=True))
        assert [hashes[index] for index in batch["index"].tolist()] == batch["image_hash"].tolist()
    assert all((hashes[i] == hashes[j]) == (i % 5 == j % 5) for i in range(20) for j in range(20))
    # Two hashed steps of two micro-batches, only in the first epoch.
    loader = build(str(data), hashed_steps=2, accum_freq=2, batch_size=2, **settings)
    assert ["image_hash" in batch for batch in loader.iterate(0)] == [True] * 4 + [False] * 6
    assert not any("image_hash" in batch for batch in loader.iterate(1))


def decoded(data: bytes) -> str:
    sample = RawSample(0, {"jpg": image_bytes(0), "json": data})
    return SampleKeys("jpg", "json:captions").decode(sample, decode_image)[1]


def test_a_blank_caption_of_a_list_is_ignored_and_a_blank_field_is_bad_in_every_epoch():
    keys = SampleKeys("jpg", "txt;json:captions")
    sample = {"jpg": image_bytes(0), "txt": b"one", "json": b'{"captions": ["", "two", " "]}'}
    drawn = {keys.decode(RawSample(0, sample), decode_image, draw)[1] for draw in range(1, 9)}
    assert drawn == {"one", "two"} and decoded(sample["json"]) == "two"
    del sample["json"]
    assert keys.decode(RawSample(0, sample), decode_image, 1)[1] == "one", "a sample may lack a field of captions"
    for draw in range(9):
        with pytest.raises(BadSampleError, match="no caption: the text is empty"):
            keys.decode(RawSample(0, sample | {"txt": b" "}), decode_image, draw)


def test_what_is_no_caption_is_a_bad_sample():
    half_a_pair = b'{"captions": "a\\ud800"}'
    for wrong in (b"[" * 100_000, b'{"captions": ' * 2000, b'{"captions": 1', b"9" * 5000, b"\xff", half_a_pair):
        with pytest.raises(BadSampleError, match="does not decode"):
            decoded(wrong)
    for wrong in (b'{"captions": []}', b'{"captions": ["a", 1]}', b'{"captions": {"a": "b"}}', b'{"other": "a"}'):
        with pytest.raises(BadSampleError, match="or a list of texts"):
            decoded(wrong)
    assert decoded('{"captions": "\\ud83d\\ude00\\ngrüße"}'.encode()) == "😀\ngrüße"


def test_a_byte_order_mark_is_no_part_of_a_caption():
    assert decoded('\ufeff{"captions": "a"}'.encode()) == "a"
    keys = SampleKeys("jpg", "txt")
    sample = {"jpg": image_bytes(0), "txt": "\ufeffa".encode()}
    assert keys.decode(RawSample(0, sample), decode_image)[1] == "a"
    with pytest.raises(BadSampleError, match="the text is empty"):
        keys.decode(RawSample(0, sample | {"txt": "\ufeff".encode()}), decode_image)


def test_captions_are_drawn_by_the_weights_of_their_keys(shards: list[str]):
    """Missing keys have no part in the draw, and keys without a weight only replace missing ones."""
    keys = {"caption_key": "caption;txt;json:captions;json:none", "draw_captions": True}
    epochs = [samples_of(shards, epoch, **keys, caption_weights=(5.0, 3.0, 1.0)) for epoch in range(12)]
    drawn = [captions_of(index).index(caption) for epoch in epochs for index, (caption, _) in epoch.items()]
    assert 0.68 < drawn.count(0) / len(drawn) < 0.82 and {*drawn} == {*range(1 + OTHERS)}
    only_missing = samples_of(shards, **keys, caption_weights=(1.0,))
    assert {caption for caption, _ in only_missing.values()} == {captions_of(number)[0] for number in range(SAMPLES)}
    for wrong in ((0.0, 0.0), (-1.0, 2.0), (1.0, 1.0, 1.0, 1.0, 1.0)):
        with pytest.raises(ValueError, match="--json-text-key-probs"):
            samples_of(shards, **keys, caption_weights=wrong)
