"""``transformers.Trainer``: resuming is bitwise exact, and the loss receives the temperature and the index."""

import math
from pathlib import Path
from unittest.mock import Mock, call

import pytest
import torch
from torch.utils.data import IterableDataset

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from transformers import CLIPConfig, CLIPModel, SiglipConfig, SiglipModel, TrainingArguments, set_seed

from openclip_ext.integrations.micro_batches import in_micro_batches
from openclip_ext.integrations.model_loss import ModelLoss
from openclip_ext.integrations.transformers import LOSS_FILE, ContrastiveTrainer
from openclip_ext.losses.registry import create_loss
from tests.integrations import towers
from tests.integrations.towers import BATCH, SAMPLES, STEPS, pairs, stateful_loss
from tests.training.tiny import CONTEXT, IMAGE, VOCABULARY, WIDTH


def clip() -> CLIPModel:
    tower = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    text = {"vocab_size": VOCABULARY, "max_position_embeddings": CONTEXT, "eos_token_id": VOCABULARY - 1}
    vision = {"image_size": IMAGE, "patch_size": 8}
    torch.manual_seed(0)
    return CLIPModel(CLIPConfig(text_config=tower | text, vision_config=tower | vision, projection_dim=WIDTH))


def collate(samples):
    names = {"image": "pixel_values", "text": "input_ids", "index": "index"}
    return {names[name]: torch.stack([torch.as_tensor(sample[name]) for sample in samples]) for name in samples[0]}


def trainer(folder: Path, data=None, loss=None, **options) -> ContrastiveTrainer:
    arguments = {"num_train_epochs": 2, "save_steps": 3, "logging_steps": 1, "remove_unused_columns": False}
    arguments |= {"per_device_train_batch_size": BATCH, "report_to": "none", "disable_tqdm": True, "use_cpu": True}
    arguments |= options
    set_seed(0)
    return ContrastiveTrainer(
        clip(),
        TrainingArguments(str(folder), learning_rate=1e-2, **arguments),
        train_dataset=pairs() if data is None else data,
        eval_dataset=pairs(index=False),
        data_collator=collate,
        contrastive_loss=loss or stateful_loss(),
    )


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    run = trainer(tmp_path_factory.mktemp("run"))
    run.train()
    return run


def _state(run) -> dict:
    return towers.final_state(run.model, run.model_loss.loss)


def test_a_resumed_run_equals_the_uninterrupted_one(uninterrupted):
    folder = Path(uninterrupted.args.output_dir)
    resumed = trainer(folder)
    resumed.train(resume_from_checkpoint=str(folder / "checkpoint-6"))  # in the second epoch
    towers.assert_equal_runs(_state(resumed), _state(uninterrupted))


class Stream(IterableDataset):
    """The same pairs without a length."""

    def __iter__(self):
        data = pairs()
        return (data[position] for position in range(len(data)))


@pytest.mark.parametrize("data", [pairs(), Stream()], ids=["with a length", "stream"])
def test_the_loss_learns_the_epoch(tmp_path, data, monkeypatch):
    starts = [(None, [0, 1, 2]), (str(tmp_path / f"checkpoint-{STEPS + 1}"), [1, 2])]
    for resume, expected in starts[: 1 + isinstance(data, Stream)]:
        run = trainer(tmp_path, data, max_steps=3 * STEPS, save_steps=STEPS + 1, ignore_data_skip=True)
        start_epoch = Mock(wraps=run.model_loss.loss.start_epoch)
        monkeypatch.setattr(run.model_loss.loss, "start_epoch", start_epoch)
        run.train(resume_from_checkpoint=resume)
        assert start_epoch.mock_calls == [call(epoch) for epoch in expected]


def _on_this_rank(folder: Path) -> dict:
    two = {"per_device_train_batch_size": BATCH // 2, "dataloader_drop_last": True, "optim": "sgd"}
    whole, resumed, parts = (trainer(folder / name, **two) for name in ("whole", "whole", "parts"))
    whole.train()
    resumed.train(resume_from_checkpoint=str(folder / "whole" / "checkpoint-3"))
    in_micro_batches(parts.model, 1)
    parts.train()
    example = towers.example("transformers_trainer.py", *towers.FEW, "--output", str(folder / "example"))
    return {"whole": _state(whole), "resumed": _state(resumed), "parts": _state(parts), "example": example}


def test_two_processes_train_as_one_and_resume_and_the_example_runs(tmp_path):
    single = trainer(tmp_path / "single", optim="sgd")
    single.train()
    towers.assert_two_processes_train_as_one(_on_this_rank, tmp_path / "two", _state(single))


def test_the_temperature_has_its_own_group_the_log_the_losss_numbers_and_validation_changes_nothing(uninterrupted):
    (group,) = (group for group in uninterrupted.optimizer.param_groups if len(group["params"]) == 1)
    assert group["params"][0] is uninterrupted.model.logit_scale
    logged = [line for line in uninterrupted.state.log_history if "loss" in line]
    assert all("infonce" in line and "temperature_median" in line for line in logged)
    before = _state(uninterrupted)
    assert uninterrupted.evaluate()["eval_loss"] > 0
    towers.assert_equal_runs(_state(uninterrupted), before)


def test_a_temperature_with_the_models_learning_rate_has_no_weight_decay(tmp_path):
    run = trainer(tmp_path, loss=create_loss("openclip"), weight_decay=0.1)
    groups = run.create_optimizer().param_groups
    (group,) = (group for group in groups if any(parameter is run.model.logit_scale for parameter in group["params"]))
    assert group["weight_decay"] == 0
    assert max(group["weight_decay"] for group in groups) == 0.1


def test_a_checkpoint_without_the_losss_state_is_named(uninterrupted, tmp_path):
    run = trainer(tmp_path)
    with pytest.raises(ValueError, match=LOSS_FILE):
        run.train(resume_from_checkpoint=str(Path(uninterrupted.args.output_dir) / "checkpoint-3"))


def test_a_failed_save_keeps_the_previous_checkpoint(tmp_path, monkeypatch):
    """The Trainer deletes earlier checkpoints at the end of its own save."""
    run = trainer(tmp_path, save_total_limit=1)
    saved = []

    def fail_second(original=run.model_loss.state_dict):
        saved.append(run.state.global_step)
        if len(saved) == 2:
            raise OSError("disk full")
        return original()

    monkeypatch.setattr(run.model_loss, "state_dict", fail_second)
    with pytest.raises(OSError, match="disk full"):
        run.train()
    assert saved == [3, 6]
    resumed = trainer(tmp_path, save_total_limit=1)
    resumed.train(resume_from_checkpoint=True)
    assert resumed.model_loss.loss.calls == 2 * STEPS


def test_a_loss_of_another_run_in_output_dir_is_not_restored(uninterrupted, tmp_path):
    """The trainer reads the model from the given folder, and the callback reads the loss from ``output_dir``."""
    trainer(tmp_path, data_seed=7, max_steps=3).train()
    with pytest.raises(ValueError, match="belongs to another run"):
        trainer(tmp_path).train(resume_from_checkpoint=str(Path(uninterrupted.args.output_dir) / "checkpoint-3"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"gradient_accumulation_steps": 2}, "do not accumulate"),
        ({"remove_unused_columns": True}, "remove the index"),
        ({"per_device_train_batch_size": SAMPLES - 1}, "dataloader_drop_last"),
    ],
)
def test_what_would_train_wrongly_is_refused(tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        trainer(tmp_path, **options).train()


def test_a_model_that_the_trainer_would_replace_is_refused(tmp_path):
    """The loss would bound and train the temperature of the first model, and the trainer would save the second."""
    arguments = TrainingArguments(str(tmp_path), remove_unused_columns=False, report_to="none", use_cpu=True)
    with pytest.raises(ValueError, match="pass model="):
        ContrastiveTrainer(args=arguments, model_init=clip, contrastive_loss=stateful_loss())


def siglip() -> SiglipModel:
    tower = {"hidden_size": WIDTH, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    text = {"vocab_size": VOCABULARY, "max_position_embeddings": CONTEXT, "projection_size": WIDTH}
    return SiglipModel(
        SiglipConfig(text_config=tower | text, vision_config=tower | {"image_size": IMAGE, "patch_size": 8})
    )


TRAINED = math.log(112)  # as in SigLIP's released models; OpenCLIP's losses bound 1/τ by 100


@pytest.mark.parametrize(
    ("name", "options", "model", "scale", "expected"),
    [
        ("siglip", {}, siglip, None, math.log(10)),
        ("siglip", {}, siglip, TRAINED, TRAINED),
        ("openclip", {}, clip, None, math.log(1 / 0.07)),
        ("openclip", {}, clip, TRAINED, TRAINED),
        ("fastclip", {"num_samples": SAMPLES, "temperature": 0.05}, clip, None, math.log(20)),
        ("fastclip", {"num_samples": SAMPLES}, clip, TRAINED, TRAINED),
        ("fastclip", {"num_samples": SAMPLES, "temperature": 0.05}, clip, TRAINED, math.log(20)),
        ("fastclip", {"num_samples": SAMPLES, "temperature_min": 0.02}, clip, TRAINED, math.log(50)),
        ("queueclip", {"temperature": 0.05}, clip, TRAINED, math.log(20)),
    ],
)
def test_a_trained_temperature_is_kept_and_in_the_bounds(name, options, model, scale, expected):
    """A fresh model gets the loss's initial value. An option that the user gives wins, and so does a constant temperature."""
    model, loss = model(), create_loss(name, embed_dim=WIDTH, **options)
    if scale is not None:
        torch.nn.init.constant_(model.logit_scale, scale)
        if name == "siglip":
            torch.nn.init.constant_(model.logit_bias, -16.5)
    optimizer, model_loss = torch.optim.SGD(model.parameters(), lr=0.0), ModelLoss(loss, model)
    model_loss.separate_rate(optimizer)
    model_loss.step(optimizer)
    assert model.logit_scale.item() == pytest.approx(expected, rel=1e-4)
    assert name != "siglip" or model.logit_bias.item() == (-10 if scale is None else -16.5)


def test_a_head_is_refused():
    with pytest.raises(ValueError, match=r"Train with: python -m openclip_ext\.training\.main"):
        ModelLoss(create_loss("cliplite", embed_dim=WIDTH), clip())
