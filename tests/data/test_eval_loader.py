"""The evaluation loader yields every usable sample once, in order."""

import os
import signal
from pathlib import Path

import pytest
import torch

from openclip_ext.data.loader.build import build_eval_loader
from openclip_ext.data.loader.eval_loader import EvalLoader
from openclip_ext.data.loader.workers import WorkerError
from openclip_ext.data.sources.source import BadDataError
from openclip_ext.data.sources.spec import DataSpec
from tests.data.loading import preprocess, tokenize
from tests.data.shards import sample_members, undecodable, write_csv, write_shards

BAD = {
    3: sample_members(3, ["txt"]),
    8: [*sample_members(8, ["jpg"]), ("000008.txt", b" \n\t")],
    15: undecodable(15),
}


def build(data: str, batch_size: int = 8, workers: int = 0) -> EvalLoader:
    settings = {"batch_size": batch_size, "workers": workers}
    return build_eval_loader(DataSpec(data), preprocess=preprocess, tokenizer=tokenize, **settings)


def numbers(loader: EvalLoader) -> list[int]:
    return [int(number) for batch in loader for number in batch["text"][:, 0]]


def test_shards_come_whole_and_in_order(tmp_path: Path):
    write_shards(tmp_path, [20, 11, 4])
    data = str(tmp_path / "*.tar")
    loader = build(data)
    batches = list(loader)
    assert [len(batch["image"]) for batch in batches] == [8, 8, 8, 8, 3]
    assert all(batch.keys() == {"image", "text", "image_hash", "caption_hash"} for batch in batches)
    assert numbers(loader) == numbers(loader) == list(range(35))
    assert sorted(numbers(build(data, workers=2))) == list(range(35))
    assert sorted(numbers(build(data, workers=2, batch_size=100))) == list(range(35))
    assert numbers(build(f"pipe:cat {tmp_path}/{{00000..00002}}.tar")) == list(range(35))
    before = torch.get_rng_state()
    functions = {"preprocess": lambda image: torch.zeros(1), "tokenizer": tokenize}
    for source in (data, Path(data), [Path(data)]):
        assert len(list(build_eval_loader(DataSpec(source), **functions, batch_size=8))) == 5
    assert torch.equal(torch.get_rng_state(), before), "the evaluation changed the random state of the training"


def test_bad_samples_are_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    paths = write_shards(tmp_path, [10, 10, 10], BAD)
    with open(paths[2], "r+b") as file:
        file.truncate(5 * 4096)
    found = numbers(build(str(tmp_path / "*.tar")))
    assert found[:17] == [*range(3), *range(4, 8), *range(9, 15), *range(16, 20)]
    assert 20 in found and 29 not in found
    assert "sample 3: no image: expected jpg or png or jpeg or webp, found txt" in caplog.text
    assert "sample 5: the image does not decode" in caplog.text
    paths = write_shards(tmp_path / "flipped", [4])
    Path(paths[0]).write_bytes(
        Path(paths[0]).read_bytes().replace(b"000002.jpg", b"000102.jpg")
    )  # with the old checksum
    assert numbers(build(paths[0])) == [0, 1, 3]
    assert "2 bad samples or corrupt parts in" in caplog.text
    csv = write_csv(tmp_path)
    for row in (4, 28, 29):  # one of two workers has only the last two rows
        (tmp_path / f"{row}.jpg").unlink()
    assert sorted(numbers(build(str(csv), batch_size=28, workers=2))) == [*range(4), *range(5, 28)]


def test_data_without_a_usable_sample_is_an_error_before_training(tmp_path: Path):
    write_shards(tmp_path, [3], {number: sample_members(number, ["json", "txt"]) for number in range(3)})
    with pytest.raises(
        BadDataError, match=r"00000.tar has no usable sample.*fields json \(3\), txt \(3\); .*--image-key"
    ):
        build(str(tmp_path / "*.tar"))
    with pytest.raises(BadDataError, match=r"gone.tar has no usable sample.*: it cannot be read: No such file"):
        build(str(tmp_path / "gone.tar"))


@pytest.mark.parametrize("workers", [0, 1])
def test_a_later_shard_without_a_usable_sample_is_an_error(tmp_path: Path, workers: int):
    write_shards(tmp_path, [3, 3], {number: sample_members(number, ["json", "txt"]) for number in range(3, 6)})
    with pytest.raises(BadDataError, match=r"no image: expected jpg or .*, found json, txt"):
        numbers(build(str(tmp_path / "*.tar"), workers=workers))
    (csv := tmp_path / "empty.csv").write_text("filepath\ttitle\n" + "empty.jpg\tsample 0\n" * 3)
    (tmp_path / "empty.jpg").touch()
    with pytest.raises(
        BadDataError, match=r"the data set has no usable sample: sample 0: empty.jpg: the image does not decode"
    ):
        numbers(build(str(csv), workers=workers))


def test_a_killed_worker_is_a_worker_error(tmp_path: Path):
    def end(texts: list[str]) -> torch.Tensor:
        os.kill(os.getpid(), signal.SIGKILL)

    spec = DataSpec(write_shards(tmp_path, [8]))
    loader = build_eval_loader(spec, preprocess=preprocess, tokenizer=end, batch_size=4, workers=1)
    with pytest.raises(WorkerError, match="was killed"):
        list(loader)
