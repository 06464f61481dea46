"""Runs that embed their training data with the starting model: for a locked image tower, or as a reference."""

import pytest
import torch

from openclip_ext.cli.errors import UsageError
from openclip_ext.data.reference import EmbeddingStore
from openclip_ext.evaluation.run_folder import read_config
from tests.data.shards import undecodable, write_shards
from tests.training import runs
from tests.training.runs import assert_same_run, losses_of, metrics_of, run, small_command, train
from tests.training.test_frozen import image_tower
from tests.training.test_models import TIMM, model_folder

LOCKED = ("--lock-image", "--force-patch-dropout", "0")
WHOLE_IMAGES = ("--aug-cfg", "scale=(1.0,1.0)")


@pytest.fixture
def projected(tmp_path) -> list[str]:
    """Flags for a timm tower, whose projection ``--lock-image`` leaves trainable."""
    return ["--model", model_folder(tmp_path / "projected", TIMM)]


@pytest.mark.parametrize(("loss", "projects"), [("openclip", False), ("neuclip", False), ("queueclip", True)])
def test_features_give_the_losses_of_the_locked_tower(shards, tmp_path, projected, loss, projects):
    """Embeddings are stored in half precision."""
    more = (*LOCKED, *(projected if projects else []))
    tower = train(shards, tmp_path, "tower", loss, *more, *WHOLE_IMAGES)
    features = train(shards, tmp_path, "features", loss, *more, "--image-features", str(tmp_path / "store"))
    for expected, found in zip(losses_of(tower), losses_of(features), strict=True):
        assert found == pytest.approx(expected, rel=2e-3)
    expected, found = (image_tower(folder / "checkpoints" / "epoch_2.pt") for folder in (tower, features))
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=1e-3)


def test_features_cannot_train_more_than_a_linear_projection(shards, tmp_path):
    model = model_folder(tmp_path / "model", {**TIMM, "timm_proj": "mlp"})
    with pytest.raises(UsageError, match="head"):
        run(small_command(shards, tmp_path, "run", "openclip", *LOCKED, "--model", model, "--image-features", "store"))


def test_features_are_written_once_and_belong_to_the_tower(shards, tmp_path):
    more = (*LOCKED, "--image-features", str(tmp_path / "store"))
    whole = train(shards, tmp_path, "whole", "queueclip", *more)
    written = (tmp_path / "store" / "images.npy").stat().st_mtime_ns
    assert_same_run(train(shards, tmp_path, "resumed", "queueclip", *more, stops=(3,)), whole)
    assert (tmp_path / "store" / "images.npy").stat().st_mtime_ns == written
    for flags in (["--seed", "4"], ["--force-quick-gelu"]):  # another seed gives other random weights
        with pytest.raises(UsageError, match="has different embeddings"):
            run(small_command(shards, tmp_path, "other", "queueclip", *more, *flags))


def test_images_that_do_not_decode_are_bad_samples_of_the_features_too(tmp_path):
    bad = {number: undecodable(number) for number in (5, 30)}
    write_shards(tmp_path / "data", [20, 28], bad)
    data, more = str(tmp_path / "data" / "*.tar"), [*LOCKED, *WHOLE_IMAGES, "--epochs", "1"]
    tower = train(data, tmp_path, "tower", "openclip", *more)
    features = train(data, tmp_path, "features", "openclip", *more, "--image-features", str(tmp_path / "store"))
    for expected, found in zip(losses_of(tower), losses_of(features), strict=True):
        assert found == pytest.approx(expected, rel=2e-3)
    assert [metrics_of(folder)[-1]["bad_samples"] for folder in (tower, features)] == [len(bad)] * 2


def test_two_ranks_share_the_features(shards, tmp_path, projected):
    more = ["--accum-freq", "2", "--batch-size", "4", "--text-groups", "1", "--fsdp", *projected]
    runs.train_on_two_ranks(shards, tmp_path, "fastclip", *LOCKED, "--image-features", str(tmp_path / "store"), *more)


def test_the_start_is_a_reference_without_a_second_command(shards, tmp_path):
    start = train(shards, tmp_path, "start", "openclip") / "checkpoints" / "epoch_2.pt"
    more = ("--pretrained", str(start), "--reference", "start", "--distill", "0.5")
    whole = train(shards, tmp_path, "whole", "queueclip", *more)
    assert losses_of(whole)[0][1] > 0 and read_config(whole)["flags"]["reference"] == str(whole / "reference")
    store = EmbeddingStore.open(whole / "reference", runs.NUM_SAMPLES)
    again = train(shards, tmp_path, "again", "queueclip", *more[:2], "--reference", str(store.folder), *more[4:])
    assert losses_of(again) == losses_of(whole)
    assert_same_run(train(shards, tmp_path, "resumed", "queueclip", *more, stops=(3,)), whole)
    with pytest.raises(UsageError, match="--pretrained"):
        run(small_command(shards, tmp_path, "other", "queueclip", *more[2:]))
