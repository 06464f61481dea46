"""The evaluation of the demo data set: a perfect model scores 1, and checkpoints load in stock OpenCLIP."""

import json
import shutil

import open_clip
import pytest
import torch

from openclip_ext.data.shapes.scene import COLORS, SHAPES, SIZES, TEXTURES
from openclip_ext.data.shapes.write import ShapesConfig, write_shards
from openclip_ext.evaluation import shapes
from openclip_ext.evaluation.features import Encoder
from openclip_ext.evaluation.shapes import chance, main, read_samples, score
from openclip_ext.model_configs import add_model_configs

NUM_SAMPLES = 400
INVERSE = {"left": "right", "right": "left", "above": "below", "below": "above"}
PHRASES = {"left": "left", "right": "right", "above": "above", "over": "above", "below": "below", "under": "below"}


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory):
    folder = tmp_path_factory.mktemp("shapes")
    write_shards(folder, ShapesConfig(NUM_SAMPLES, split="test", samples_per_shard=150), workers=1)
    return folder


@pytest.fixture(scope="module")
def samples(data_dir):
    return read_samples(data_dir)


def encoder_of(model_class, samples):
    """Return an encoder for a toy model, with an image size of 32 and OpenCLIP's tokenizer."""
    preprocess = open_clip.image_transform(32, is_train=False)
    tokenizer = open_clip.get_tokenizer("ViT-B-32")
    return Encoder(model_class(samples, tokenizer), preprocess, tokenizer, torch.device("cpu"), workers=0)


def read_caption(caption):
    """Parse a caption; return the words of each item, the first item's relation to the second or None, and the background."""
    body, _, background = caption.partition(" on ")
    words = body.split()
    relation = next((PHRASES[word] for word in words if word in PHRASES), None)
    vocabulary = (*SHAPES, *COLORS, *SIZES, *TEXTURES, "shape")
    items, current = [], None
    for word in words:
        if word in ("a", "an"):
            current = set()
            items.append(current)
        elif word in vocabulary:
            current.add(word)
    return items, relation, background or None


def truth_of(caption, scene):
    """Return 0 if a caption contradicts the scene, 1 if it is true but omits an item, 2 if it describes all items."""
    said, relation, background = read_caption(caption)
    shown = [{item.shape, item.color, item.size, item.texture, "shape"} for item in scene.items]
    orders = [(shown, scene.relation)]
    if scene.relation is not None:
        orders.append((shown[::-1], INVERSE[scene.relation]))
    true = background in (None, scene.background) and any(
        len(said) <= len(order)
        and all(words <= item for words, item in zip(said, order, strict=False))
        and relation in (None, place)
        for order, place in orders
    )
    return float(true) * (2.0 if len(said) == len(shown) else 1.0)


class Oracle(torch.nn.Module):
    """A perfect model. Image i is the unit vector of axis i, where each text has the value of `truth_of` for this image."""

    def __init__(self, samples, tokenizer):
        super().__init__()
        self.visual, self.samples, self.tokenizer, self.calls = torch.nn.Identity(), samples, tokenizer, 0

    def encode_image(self, image):
        start, self.calls = self.calls, self.calls + len(image)
        return torch.eye(len(self.samples))[start : self.calls]

    def encode_text(self, text):
        rows = []
        for tokens in text.tolist():
            caption = self.tokenizer.decode([token for token in tokens if 0 < token < 49406]).strip()
            rows.append([truth_of(caption, sample.scene) for sample in self.samples])
        return torch.tensor(rows)


def test_oracle_scores_one_in_everything(samples):
    assert len({sample.caption for sample in samples}) < NUM_SAMPLES, "expected some equal captions"
    assert score(encoder_of(Oracle, samples), samples) == dict.fromkeys(chance(samples), pytest.approx(1.0))


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
    paths = [tmp_path / f"runs/{name}/checkpoints/epoch_1.pt" for name in ("openclip", "queueclip", "chance")]
    for path in paths:
        path.parent.mkdir(parents=True)
        shutil.copy(checkpoint, path)
    monkeypatch.setattr(shapes, "score", lambda encoder, samples: numbers["trained"])
    for given, titles in ((paths[:2], ["openclip", "queueclip"]), (paths[1:], [str(path) for path in paths[1:]])):
        main([*arguments, "--untrained", "--checkpoint", *map(str, given)])
        several = json.loads((tmp_path / "o.json").read_text())
        assert list(several) == ["model", "checkpoint", *titles, "untrained", "chance"]


def test_a_runs_context_length_is_used(data_dir, tmp_path, capsys):
    add_model_configs()
    checkpoint = tmp_path / "run" / "checkpoints" / "epoch_1.pt"
    checkpoint.parent.mkdir(parents=True)
    torch.save(open_clip.create_model("demo-vit", force_context_length=9).state_dict(), checkpoint)
    (tmp_path / "run" / "params.txt").write_text("model: demo-vit\nforce_context_length: 9\n")
    main(["--data-dir", str(data_dir), "--model", "demo-vit", "--device", "cpu", "--checkpoint", str(checkpoint)])
    assert "trained" in capsys.readouterr().out


def test_wrong_folders_are_refused_with_the_cure(tmp_path):
    with pytest.raises(ValueError, match=r"expected \*\.tar .*--split test"):
        read_samples(tmp_path)
