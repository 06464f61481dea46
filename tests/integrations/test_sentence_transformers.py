"""sentence-transformers: resuming is bitwise exact, the temperature is trained, and wrong input is rejected."""

import runpy
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("sentence_transformers")
pytest.importorskip("datasets")

from datasets import Dataset
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer, SentenceTransformerTrainingArguments
from sentence_transformers.sentence_transformer.modules import StaticEmbedding
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import nn
from torch.nn.functional import normalize

from openclip_ext.contrastive.model import LOGIT_SCALE
from openclip_ext.data import with_index
from openclip_ext.integrations.sentence_transformers import GlobalContrastiveLoss
from openclip_ext.losses.registry import create_loss
from tests.integrations.towers import (
    BATCH,
    EXAMPLES,
    FEW,
    PAIRS,
    SAMPLES,
    assert_equal_runs,
    example,
    final_state,
    stateful_loss,
)
from tests.training.tiny import WIDTH

NUMBERS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]


def encoder():
    tokenizer = Tokenizer(
        models.WordLevel({word: number for number, word in enumerate([*NUMBERS, "?"])}, unk_token="?")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    torch.manual_seed(0)
    return SentenceTransformer(modules=[StaticEmbedding(tokenizer, embedding_dim=WIDTH)], device="cpu")


def train(folder, resume=None, **options):
    texts = [" ".join(NUMBERS[int(digit)] for digit in f"{number:02d}") for number in range(SAMPLES)]
    pairs = Dataset.from_dict({"anchor": texts, "positive": texts[::-1]})
    loss = GlobalContrastiveLoss(encoder(), stateful_loss())
    arguments = SentenceTransformerTrainingArguments(
        str(folder),
        num_train_epochs=2,
        per_device_train_batch_size=BATCH,
        learning_rate_mapping=loss.learning_rates(),
        save_steps=3,
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        **options,
    )
    train_set = with_index(pairs).rename_column("index", "label")
    trainer = SentenceTransformerTrainer(
        loss.model, arguments, train_dataset=train_set, eval_dataset=train_set, loss=loss, callbacks=[loss.callback()]
    )
    trainer.train(resume_from_checkpoint=resume)
    return trainer


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    return train(tmp_path_factory.mktemp("run"))


def test_a_resumed_run_equals_the_uninterrupted_one(uninterrupted):
    folder = Path(uninterrupted.args.output_dir)
    resumed = train(folder, resume=str(folder / "checkpoint-3"))
    assert_equal_runs(*(_state(run) for run in (resumed, uninterrupted)))


def _state(trainer):
    loss = trainer.loss
    return final_state(loss.model, loss.model_loss.loss) | {f"model.{LOGIT_SCALE}": loss.logit_scale.detach()}


def test_the_temperature_trains_and_validation_changes_nothing(uninterrupted):
    before = _state(uninterrupted)
    start = uninterrupted.loss.model_loss.loss.initial_logit_scale
    assert before[f"model.{LOGIT_SCALE}"].item() != pytest.approx(start)
    assert uninterrupted.evaluate()["eval_loss"] > 0
    assert all(torch.equal(_state(uninterrupted)[name], value) for name, value in before.items())


def test_the_temperature_has_no_weight_decay(tmp_path):
    found = [train(tmp_path, weight_decay=decay, learning_rate=0.0).loss.logit_scale for decay in (0.0, 0.1)]
    assert torch.equal(*found)


def test_accumulation_and_more_than_three_columns_are_refused(tmp_path):
    with pytest.raises(ValueError, match="do not accumulate"):
        train(tmp_path, gradient_accumulation_steps=2)
    loss = GlobalContrastiveLoss(encoder(), stateful_loss())
    features = loss.model.preprocess(["one two"])
    with pytest.raises(ValueError, match="found 4"):
        loss([dict(features) for _ in range(4)], torch.tensor([0]))


def test_a_third_column_has_hard_negatives():
    columns = [["one two", "three four"], ["two three", "five"], ["one", "six seven"]]
    one, other = (GlobalContrastiveLoss(encoder(), stateful_loss()) for _ in range(2))
    value = one([one.model.preprocess(texts) for texts in columns], torch.arange(2))
    names = ("image_features", "text_features", "hard_negative_features")
    features = [normalize(one.model.encode(texts, convert_to_tensor=True)) for texts in columns]
    scale = other.logit_scale.exp()
    expected = other.model_loss.loss(
        **dict(zip(names, features, strict=True)), logit_scale=scale, index=torch.arange(2)
    )
    torch.testing.assert_close(value, expected)
    assert value != stateful_loss()(*features[:2], scale, index=torch.arange(2))


class Rows(nn.Module):
    """A small replacement for sentence-transformers' transformer module. Its input has rows of tokens and a mask."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(16, WIDTH)

    def forward(self, features):
        mask = features["attention_mask"][..., None]
        return features | {"sentence_embedding": (self.table(features["input_ids"]) * mask).sum(dim=1)}


def test_micro_batches_give_the_value_and_gradient_of_the_whole_batch():
    generator = torch.Generator().manual_seed(0)
    shape = (10, 5)
    columns = [
        {"input_ids": torch.randint(16, shape, generator=generator), "attention_mask": torch.ones(shape)}
        for _ in range(2)
    ]
    longer = torch.arange(1.0, 11)[:, None]  # factors of the embeddings, which the loss must normalize
    scaled = [column | {"attention_mask": longer * column["attention_mask"]} for column in columns]
    found = []
    for size, for_validation in ((None, columns), (4, scaled)):
        torch.manual_seed(0)
        model = SentenceTransformer(modules=[Rows()], device="cpu").double().train()
        loss = GlobalContrastiveLoss(model, stateful_loss().double(), micro_batch_size=size)
        value = loss([dict(column) for column in columns], torch.arange(10))
        value.backward()
        gradients = model[0].table.weight.grad, loss.logit_scale.grad
        model.eval()
        found.append((value.detach(), *gradients, loss(for_validation, None).detach()))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)
    static = GlobalContrastiveLoss(encoder().train(), stateful_loss(), micro_batch_size=4)
    with pytest.raises(ValueError, match="remove micro_batch_size"):
        static([static.model.preprocess(["one"]), static.model.preprocess(["two"])], torch.arange(1))


def test_the_example_runs(tmp_path):
    arguments = ["--packages", "PIL", "--epochs", "1", "--batch", "32", "--output", str(tmp_path)]
    assert '"split": "test"' in example("sentence_transformers_docstrings.py", *arguments)


@pytest.fixture
def clip_example(monkeypatch):
    monkeypatch.setattr(sys, "path", [str(EXAMPLES), *sys.path])
    return runpy.run_path(str(EXAMPLES / "sentence_transformers_clip.py"))


@pytest.mark.parametrize(
    ("kind", "name", "micro_batch_size"), [("clip", "fastclip", None), ("clip", "fastclip", 4), ("siglip", "siglip", 4)]
)
def test_image_text_pairs_give_the_models_outputs_to_the_loss(clip_example, kind, name, micro_batch_size, tmp_path):
    """The value and all gradients equal those of the loss and of the model without sentence-transformers."""
    data = clip_example["shapes"]("train", 10)
    torch.manual_seed(0)
    model = clip_example["create_model"](kind, data["caption"], tmp_path).to("cpu").train()
    clip = model[0].model
    nn.init.constant_(clip.logit_scale, 3.0)  # a trained temperature, which is kept
    options = {"embed_dim": 64, "num_samples": 10} if name == "fastclip" else {}
    loss = GlobalContrastiveLoss(model, create_loss(name, **options), micro_batch_size=micro_batch_size)
    columns = [model.preprocess(list(data[column])) for column in ("image", "caption")]
    value = loss([dict(column) for column in columns], torch.arange(10))
    value.backward()
    found = {name: weight.grad for name, weight in clip.named_parameters()}

    clip.zero_grad()
    inputs = {"pixel_values": columns[0]["pixel_values"], "input_ids": columns[1]["input_ids"]}
    outputs = clip(**inputs, attention_mask=columns[1].get("attention_mask"))
    bias = {"logit_bias": clip.logit_bias} if kind == "siglip" else {}
    direct = create_loss(name, **options)(
        image_features=outputs.image_embeds,
        text_features=outputs.text_embeds,
        logit_scale=clip.logit_scale.exp(),
        index=torch.arange(10) if name == "fastclip" else None,
        **bias,
    )
    direct.backward()
    torch.testing.assert_close(value, direct)
    assert found.pop("logit_scale").item() == pytest.approx(clip.logit_scale.grad.item(), rel=1e-4)
    for weight, gradient in found.items():
        torch.testing.assert_close(gradient, clip.get_parameter(weight).grad, rtol=1e-3, atol=1e-6, msg=weight)


def test_the_example_with_images_runs(tmp_path):
    assert PAIRS in example("sentence_transformers_clip.py", "--model", "clip", *FEW, "--output", str(tmp_path))
