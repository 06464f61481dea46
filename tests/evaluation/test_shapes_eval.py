"""The evaluation of the demo data set: a perfect model scores 1, and checkpoints load in stock OpenCLIP."""

import json
import shutil
from collections import Counter

import open_clip
import pytest
import torch

from eval import shapes
from eval.shapes import chance, main, read_samples, score
from openclip_ext.data.shapes.scene import describe
from openclip_ext.data.shapes.write import ShapesConfig, write_shards
from openclip_ext.evaluation.encoder import Encoder
from openclip_ext.model_configs import add_model_configs

NUM_SAMPLES = 400


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory):
    folder = tmp_path_factory.mktemp("shapes")
    write_shards(folder, ShapesConfig(NUM_SAMPLES, split="test", samples_per_shard=150), workers=1)
    return folder


@pytest.fixture(scope="module")
def samples(data_dir):
    return read_samples(data_dir)


def value_of(caption, sample):
    """Return 2 for a sample's complete caption, 1 for a caption with other true words about one item, otherwise 0."""
    scene = sample.scene
    if caption in (sample.caption, describe(scene, scene.relation)):
        return 2.0
    item = scene.items[0]
    shown = {"a", "an", "on", "shape", item.shape, item.color, item.size, item.texture, scene.background}
    return float(scene.relation is None and shown.issuperset(caption.split()))


class Oracle(torch.nn.Module):
    """A perfect model. Image i is the unit vector of axis i, where each text has the value of `value_of` for this image."""

    def __init__(self, samples, tokenizer):
        super().__init__()
        self.visual, self.samples, self.tokenizer, self.calls = torch.nn.Identity(), samples, tokenizer, 0

    def encode_image(self, image):
        start, self.calls = self.calls, self.calls + len(image)
        return torch.eye(len(self.samples))[start : self.calls]

    def encode_text(self, text):
        numbers = [[token for token in tokens if 0 < token < 49406] for tokens in text.tolist()]
        captions = [self.tokenizer.decode(tokens).strip() for tokens in numbers]
        return torch.tensor([[value_of(caption, sample) for sample in self.samples] for caption in captions])


def test_oracle_scores_one_in_everything(samples):
    captions = Counter(sample.caption for sample in samples)
    assert len(captions) < NUM_SAMPLES, "expected some equal captions"
    preprocess, tokenizer = open_clip.image_transform(32, is_train=False), open_clip.get_tokenizer("ViT-B-32")
    encoder = Encoder(Oracle(samples, tokenizer), preprocess, tokenizer, torch.device("cpu"), workers=0)
    assert score(encoder, samples) == dict.fromkeys(chance(samples), pytest.approx(1.0))
    recall = [1 / len(captions), sum(count**2 for count in captions.values()) / NUM_SAMPLES**2]
    assert list(chance(samples).values()) == pytest.approx([1 / 8, 1 / 10, 1 / 80, 1 / 80, 1 / 4, *recall])


def test_command_line_loads_a_training_checkpoint_through_open_clip(data_dir, tmp_path, capsys, monkeypatch):
    add_model_configs()
    torch.manual_seed(0)
    model = open_clip.create_model("demo-vit")
    checkpoint = tmp_path / "epoch_1.pt"
    torch.save({"epoch": 1, "name": "x", "state_dict": model.state_dict(), "optimizer": {}}, checkpoint)
    output = str(tmp_path / "o.json")
    arguments = ["--data-dir", str(data_dir), "--model", "demo-vit", "--device", "cpu", "--json", output]
    main([*arguments, "--checkpoint", str(checkpoint), "--untrained"])
    numbers = json.loads((tmp_path / "o.json").read_text())
    assert numbers["trained"] == numbers["untrained"]  # same seed, so the untrained weights equal the loaded ones
    table = capsys.readouterr().out.splitlines()
    assert len(table) == 2 + len(numbers["chance"])
    assert table[0].split("|")[2:5] == ["   trained ", " untrained ", "    chance "]
    # The title of a checkpoint is the name of its run. If names are not distinct, the titles are the paths.
    names = ("runs/openclip", "runs/queueclip", "other/queueclip", "runs/untrained")
    paths = [tmp_path / f"{name}/checkpoints/epoch_1.pt" for name in names]
    for path in paths:
        path.parent.mkdir(parents=True)
        shutil.copy(checkpoint, path)
    monkeypatch.setattr(shapes, "score", lambda encoder, samples: numbers["trained"])
    for given in (paths[:2], paths[1:3], paths[2:]):
        titles = ["openclip", "queueclip"] if given == paths[:2] else [*map(str, given)]
        main([*arguments, "--untrained", "--checkpoint", *map(str, given)])
        several = json.loads((tmp_path / "o.json").read_text())
        assert list(several) == ["model", "checkpoint", *titles, "untrained", "chance"]


def test_wrong_folders_are_refused_with_the_cure(tmp_path):
    with pytest.raises(ValueError, match=r"is not the test split: .*--split test"):
        read_samples(tmp_path)
