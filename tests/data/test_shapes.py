"""The demo data set: dependence on (seed, split, index) alone, held-out pairs, and shards after an interruption."""

import hashlib
import json
import os
import tarfile

import numpy as np
import pytest

from openclip_ext.data.shapes.__main__ import main
from openclip_ext.data.shapes.render import render
from openclip_ext.data.shapes.scene import (
    RELATIONS,
    Item,
    Scene,
    sample_scene,
)
from openclip_ext.data.shapes.write import RECIPE_FILE, SIZES_FILE, ShapesConfig, make_sample, write_shards


def contents(folder):
    """Return (name, content) of all members of all shards, in order."""
    members = []
    for shard in sorted(folder.glob("*.tar")):
        with tarfile.open(shard) as tar:
            members += [(m.name, tar.extractfile(m).read()) for m in tar]
    return members


def test_shards_are_the_same_samples_whatever_their_size_and_workers(tmp_path):
    write_shards(tmp_path / "a", ShapesConfig(50, samples_per_shard=7), workers=1)
    write_shards(tmp_path / "b", ShapesConfig(50, samples_per_shard=20), workers=2)
    assert contents(tmp_path / "a") == contents(tmp_path / "b")
    names = [name for name, _ in contents(tmp_path / "a")]
    assert names[:4] == ["00000000.png", "00000000.txt", "00000000.json", "00000001.png"]
    assert json.loads((tmp_path / "b" / SIZES_FILE).read_text()) == {"00000.tar": 20, "00001.tar": 20, "00002.tar": 10}


def test_the_samples_are_those_of_the_published_results():
    """If this hash changes, GENERATOR_VERSION must change, and all results on the demo set are of other data."""
    content = hashlib.blake2b(digest_size=8)
    for split in ("train", "test"):
        for index in range(200):
            sample = make_sample(0, split, index)
            content.update(sample.txt + sample.json)
    assert Scene.from_attributes(json.loads(sample.json)) == sample_scene(0, "test", 199)
    assert content.hexdigest() == "852dad67549f3657"


def test_relations_are_where_they_are_said_to_be():
    for number, relation in enumerate(RELATIONS):
        items = (Item("circle", "red", "medium", "plain"), Item("circle", "blue", "medium", "plain"))
        for seed in range(10):
            image = render(Scene(items, "snow", relation), np.random.default_rng([number, seed])).astype(float)
            red = image[..., 0] - image[..., 2]
            x, y = (np.argwhere(red > 80).mean(axis=0) - np.argwhere(red < -80).mean(axis=0))[::-1]
            offset = {"left": (-x, y), "right": (x, y), "above": (-y, x), "below": (y, x)}[relation]
            assert offset[0] > 12 and abs(offset[1]) < 6


def test_a_complete_set_is_left_alone_and_a_broken_one_is_written_again(tmp_path):
    config = ShapesConfig(30, samples_per_shard=10)
    assert write_shards(tmp_path, config, workers=1)
    whole = contents(tmp_path)
    assert not write_shards(tmp_path, config, workers=1)
    # A killed program leaves neither sizes.json nor the last shard. A user may remove one shard.
    for missing in (("00001.tar", SIZES_FILE), ("00001.tar",)):
        for name in missing:
            (tmp_path / name).unlink()
        assert write_shards(tmp_path, config, workers=1)
        assert contents(tmp_path) == whole
    assert sorted(os.listdir(tmp_path)) == ["00000.tar", "00001.tar", "00002.tar", RECIPE_FILE, SIZES_FILE]


def test_a_folder_with_something_else_is_refused(tmp_path, capsys):
    write_shards(tmp_path / "demo", ShapesConfig(4), workers=1)
    with pytest.raises(ValueError, match=r"set of .*'seed': 0.* expected .*'seed': 1"):
        write_shards(tmp_path / "demo", ShapesConfig(4, seed=1), workers=1)
    main(["--output", str(tmp_path / "demo"), "--num-samples", "4"])
    assert "4 samples in 1 shards, already there" in capsys.readouterr().out
    (tmp_path / "file").touch()
    with pytest.raises(SystemExit, match=r"error: .*Not a directory"):
        main(["--output", str(tmp_path / "file" / "demo"), "--num-samples", "4"])
