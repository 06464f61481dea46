"""Weight averages, learning rates per tower and layer, LAMB, and the best model: each alone, and together in a resumed run."""

import json
import math
from pathlib import Path

import open_clip
import pytest
import torch
from torch import nn

from openclip_ext import model_configs
from openclip_ext.checkpoint import format as ckpt
from openclip_ext.checkpoint.format import TRAINED_KEY
from openclip_ext.cli.errors import UsageError
from openclip_ext.training.checkpoint import restoring
from openclip_ext.training.config import OptimizerConfig, ScheduleConfig
from openclip_ext.training.ema import ModelEma
from openclip_ext.training.optimizer import (
    SCALE,
    create_optimizer,
    create_schedule,
    depths,
    lr_scales,
)
from openclip_ext.training.step import StepSettings, TrainStep
from openclip_ext.training.validation import is_best
from tests.training.runs import (
    EXIT_AFTER_SIGTERM,
    SMALL_MODEL,
    assert_same_run,
    differences,
    final_state,
    losses_of,
    results_of,
    run,
    small_command,
    stock_model,
    train,
    train_on_two_ranks,
)
from tests.training.tiny import CPU, tiny_loss, tiny_model

METRIC = "image_to_text_R@5"


# --- the average of the weights ---------------------------------------------------------------------------------------


def test_the_average_against_its_equation():
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    ema = ModelEma(model, decay=0.6)
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    for step in range(5):
        with torch.no_grad():
            for value in (*model.parameters(), model[1].running_mean):
                value += torch.randn_like(value)
        good = step != 3
        ema.update(step, torch.tensor(good))
        decay = min(0.6, 1 - (1 + step) ** (-2 / 3))
        for name, value in model.state_dict().items():
            if good and value.is_floating_point():
                expected[name] = decay * expected[name] + (1 - decay) * value
    for name, value in ema.state_dict().items():
        torch.testing.assert_close(value, expected[name])
    trained = {name: value.clone() for name, value in model.state_dict().items()}
    with ema.in_place():  # for an evaluation
        assert differences(model.state_dict(), ema.state_dict()) == [] != differences(model.state_dict(), trained)
    assert differences(model.state_dict(), trained) == []


def test_16_bits_are_averaged_in_32():
    model = nn.Linear(2, 2, bias=False).to(torch.bfloat16)
    ema = ModelEma(model, decay=0.9999)
    before = ema.state_dict()["weight"].clone()
    with torch.no_grad():
        model.weight += 1
    ema.update(10**8, torch.tensor(True))
    moved = ema.state_dict()["weight"] - before
    assert moved.dtype == torch.float32
    torch.testing.assert_close(moved, torch.full_like(moved, 1e-4), rtol=0.2, atol=0)


# --- learning rates ---------------------------------------------------------------------------------------------------


# Parameters before the first layer, and after the last layer.
BEFORE = ("class_embedding", "positional_embedding", "conv1.weight", "ln_pre.weight", "trunk.patch_embed.proj.weight")
BEFORE += ("trunk.cls_token", "trunk.stem.0.weight", "bn1.weight", "conv3.weight", "token_embedding.weight")
AFTER = ("proj", "trunk.norm.weight", "head.proj.weight", "trunk.attn_pool.latent", "attnpool.positional_embedding")
AFTER += ("text_projection", "ln_final.bias")


@pytest.mark.parametrize(
    "layers", ["transformer.resblocks.{}.x", "trunk.blocks.{}.x", "layer{}.0.x", "encoder.layer.{}.x"]
)
def test_depth_of_each_parameter_of_a_tower_with_two_layers(layers):
    expected = {**dict.fromkeys(BEFORE, 3), layers.format(1): 2, layers.format(2): 1, **dict.fromkeys(AFTER, 0)}
    assert depths("image", list(expected)) == expected


def _demo() -> nn.Module:
    # OpenCLIP uses the last added configuration with this name, and another test may have added a different configuration.
    open_clip.add_model_config(Path(model_configs.__file__).parent)
    return open_clip.create_model("demo-vit")


def test_scales_of_a_model():
    model = _demo()
    scales = lr_scales(model, {"image": (1.0, 0.5), "text": (0.1, 1.0)})
    blocks = [f"visual.transformer.resblocks.{number}.ln_1.weight" for number in (0, 1)]
    names = ["visual.conv1.weight", *blocks, "visual.proj", "logit_scale"]
    assert [scales[name] for name in names] == [0.125, 0.25, 0.5, 1, 1]
    text = [name for name in scales if not name.startswith(("visual", "logit"))]
    assert [scales[name] for name in text] == pytest.approx([0.1] * len(text))


def test_the_schedule_keeps_the_scales():
    model = _demo()
    config = OptimizerConfig(lr=1e-3, lr_image=1e-4, text_layer_decay=0.5)
    optimizer = create_optimizer(model, config, logit_scale_lr=3e-4)
    assert sum(len(group["params"]) for group in optimizer.param_groups) == len(list(model.parameters()))
    schedule = create_schedule(ScheduleConfig(lr=1e-3, epochs=1, warmup=10), optimizer, 100, logit_scale_lr=3e-4)
    for step in (0, 4, 50):
        schedule(step)
        encoders = optimizer.param_groups[:-1]
        plain = next(group["lr"] for group in encoders if group[SCALE] == 1)
        assert all(group["lr"] == pytest.approx(plain * group[SCALE]) for group in encoders)
        assert optimizer.param_groups[-1]["lr"] == 3e-4
    assert len({group[SCALE] for group in encoders}) == 5  # one in the image tower, four in the two-layer text tower


def test_the_cosine_ends_at_its_floor():
    """After the usual warm-up, the learning rate falls from lr to lr_min. A tower's factor scales both limits."""
    parameters = [nn.Parameter(torch.zeros(1)) for _ in range(2)]
    optimizer = torch.optim.SGD([{"params": parameters[:1]}, {"params": parameters[1:], SCALE: 0.5}], lr=1e-3)
    config = ScheduleConfig(epochs=2, warmup=10, lr=1e-3, lr_min=4e-5)
    schedule = create_schedule(config, optimizer, steps_per_epoch=30, logit_scale_lr=None)
    for step in (0, 4, 9, 10, 35, 59):
        schedule(step)
        cosine = 4e-5 + 0.5 * (1e-3 - 4e-5) * (1 + math.cos(math.pi * (step - 10) / 50))
        expected = 1e-3 * (step + 1) / 10 if step < 10 else cosine
        assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([expected, expected / 2], rel=1e-12)
    assert expected < 5e-5


@pytest.mark.parametrize("settings", [{"name": "const-cooldown", "cooldown_epochs": 0}, {"warmup": 30}, {"warmup": 10}])
def test_the_steps_that_a_resumed_last_epoch_may_have_in_addition_use_the_last_learning_rate(settings):
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1e-3)
    schedule = create_schedule(ScheduleConfig(epochs=1, lr=1e-3, **settings), optimizer, 30, logit_scale_lr=None)
    rates = []
    for step in (29, 30, 31):
        schedule(step)
        rates.append(optimizer.param_groups[0]["lr"])
    assert rates[0] > 0 and rates == rates[:1] * 3


def test_a_resume_keeps_the_implementation_that_this_device_needs(tmp_path):
    """OpenCLIP's checkpoints store ``fused=None``. On a GPU, only a fused optimizer can skip a step without a sync."""
    model, loss = tiny_model(), tiny_loss("openclip")
    stock = torch.optim.AdamW(model.parameters())
    model.logit_scale.sum().backward()
    stock.step()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    step = TrainStep(model, loss, optimizer, StepSettings(CPU), torch.amp.GradScaler("cpu"))
    content = {"epoch": 1, "name": "stock", "state_dict": model.state_dict(), "optimizer": stock.state_dict()}
    content["scaler"] = torch.amp.GradScaler("cpu", init_scale=8.0).state_dict()
    torch.save(content, tmp_path / "epoch_1.pt")
    identity = ckpt.RunIdentity("tiny", "openclip", "adamw", 40, 8, 0)
    position = restoring.restore(ckpt.read(tmp_path / "epoch_1.pt"), identity, 5, step, {})
    assert (position, step.scaler.get_scale()) == (ckpt.Position(epoch=1, step=5, samples=40), 8.0)
    assert step.optimizer.param_groups[0]["fused"] is True
    before = model.logit_scale.detach().clone()
    step.optimizer.grad_scale, step.optimizer.found_inf = None, torch.ones(())
    step.optimizer.step()
    assert torch.equal(model.logit_scale, before)


# --- the best model ---------------------------------------------------------------------------------------------------


def test_the_best_of_the_earlier_results(tmp_path, caplog):
    assert is_best({"top1": 0.1}, "top1", tmp_path, 1)
    torch.save({"epoch": 1, "name": "run", "state_dict": {}}, tmp_path / "best.pt")
    lines = [{"top1": 0.3, "val_loss": 2.0, "epoch": 1}, {"top1": 0.2, "val_loss": math.nan, "epoch": 2}]
    (tmp_path / "results.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert is_best({"top1": 0.31}, "top1", tmp_path, 3)
    assert not is_best({"top1": 0.3}, "top1", tmp_path, 3)
    assert not is_best({"top1": math.nan}, "top1", tmp_path, 3)
    assert is_best({"val_loss": 1.9}, "val_loss", tmp_path, 3)
    assert not is_best({"val_loss": 2.1}, "val_loss", tmp_path, 3)
    assert is_best({"top1": 0.3}, "top1", tmp_path, 1)  # the logged result of epoch 1 belongs to this model
    assert not is_best({}, "top1", tmp_path, 3)
    assert not is_best({"top5": 0.3}, "top1", tmp_path, 3)
    assert "no such metric in this evaluation, found: top5" in caplog.text


def test_the_name_of_a_task_does_not_tell_what_is_better(tmp_path):
    torch.save({"epoch": 1, "name": "run", "state_dict": {}}, tmp_path / "best.pt")
    (tmp_path / "results.jsonl").write_text('{"kept_blossoms": 0.3, "epoch": 1}\n')
    assert is_best({"kept_blossoms": 0.4}, "kept_blossoms", tmp_path, 2)
    assert not is_best({"kept_blossoms": 0.2}, "kept_blossoms", tmp_path, 2)


def test_a_best_model_that_could_not_be_saved_does_not_prevent_the_next(shards, tmp_path, caplog):
    """The metric is the same in all epochs, so that no epoch is better than the first."""
    metric = ["--val-data", shards, "--keep-best", "num_samples", "--resume", "latest"]
    argv = small_command(shards, tmp_path, "run", "openclip", *metric)
    assert run(argv, stop_after=3) == EXIT_AFTER_SIGTERM
    best = tmp_path / "run" / "checkpoints" / "best.pt"
    best.mkdir()  # no file can replace a folder
    assert run(argv, stop_after=4) == EXIT_AFTER_SIGTERM  # two steps of the first epoch, and two of the second
    assert len(results_of(tmp_path / "run")) == 1 and "best.pt could not be saved" in caplog.text
    best.rmdir()
    assert run(argv) == 0
    assert torch.load(best, weights_only=True)["epoch"] == 2


# --- arguments of the optimizer ---------------------------------------------------------------------------------------


def test_globs_exclude_parameters_from_weight_decay():
    model = _demo()
    names = {id(parameter): name for name, parameter in model.named_parameters()}

    def without_decay(
        wrapped: nn.Module, *globs: str, name: str = "adamw", logit_scale_lr: float | None = None
    ) -> set[str]:
        optimizer = create_optimizer(wrapped, OptimizerConfig(name, decay_excluded=globs), logit_scale_lr)
        groups = [group for group in optimizer.param_groups if not group["weight_decay"]]
        return {names[id(parameter)] for group in groups for parameter in group["params"]}

    usual = without_decay(model)
    assert {"positional_embedding", "visual.proj"}.isdisjoint(usual)
    wrapped = nn.Module()
    wrapped.module = model  # DistributedDataParallel adds the prefix "module." to the names
    for one in (model, wrapped):
        found = without_decay(one, "*positional_embedding", "visual.proj")
        assert found - usual == {"positional_embedding", "visual.positional_embedding", "visual.proj"}
    with pytest.raises(UsageError, match=r"--wd-exclude proj: matches no trained parameter"):
        without_decay(model, "visual.proj", "proj")
    # timm asks the model for its list, which a wrapper does not have.
    of_timm = without_decay(model, name="timm/sgd")
    assert {"positional_embedding", "visual.positional_embedding"} <= of_timm
    assert without_decay(torch.compile(model), name="timm/sgd") == of_timm
    # A loss with its own learning rate of the temperature changes the groups, but not which parameters have weight decay.
    assert without_decay(model, name="timm/sgd", logit_scale_lr=1e-4) == of_timm
    assert without_decay(model, "visual.proj", name="timm/sgd") == of_timm | {"visual.proj"}


def test_further_arguments_reach_the_optimizer():
    model = nn.Linear(2, 2)
    for name, words, expected in (
        ("adamw", ["amsgrad=True"], {"amsgrad": True}),
        ("timm/sgd", ["nesterov=False", "dampening=0.5"], {"nesterov": False, "dampening": 0.5}),
    ):
        config = OptimizerConfig(name=name, kwargs=tuple(words))
        (*_, group) = create_optimizer(model, config, None).param_groups
        assert {key: group[key] for key in expected} == expected
    lookahead = create_optimizer(model, OptimizerConfig("timm/lookahead_sgd", lookahead_steps=3), None)
    assert {group["lookahead_k"] for group in lookahead.param_groups} == {3}


@pytest.mark.parametrize("logit_scale_lr", [None, 1e-4])
def test_muon_trains_only_matrices_of_layers(logit_scale_lr: float | None):
    pytest.importorskip("timm.optim.muon")
    model = _demo()
    optimizer = create_optimizer(model, OptimizerConfig("timm/muon", lr=1e-3), logit_scale_lr)
    model.encode_text(torch.ones(1, 20, dtype=torch.long)).sum().backward()
    optimizer.step()
    by_muon = {id(parameter) for parameter, state in optimizer.state.items() if state["use_muon"]}
    names = {name for name, parameter in model.named_parameters() if id(parameter) in by_muon}
    assert {name.split(".")[-2] for name in names} == {"attn", "out_proj", "c_fc", "c_proj"}, (
        "no embedding or projection"
    )


# --- together ---------------------------------------------------------------------------------------------------------


def test_a_resumed_run_is_the_uninterrupted_one(shards, tmp_path):
    rates = ["--opt", "lamb", "--lr-text", "5e-4", "--image-layer-decay", "0.7", "--text-layer-decay", "0.9"]
    rates += ["--opt-kwargs", "max_grad_norm=0.5", "--wd-exclude", "*positional_embedding", "visual.*"]
    more = [*rates, "--model-ema-decay", "0.8", "--keep-best", METRIC, "--val-data", shards]
    plain_run = train(shards, tmp_path, "plain", "neuclip", *rates)
    whole_run = train(shards, tmp_path, "whole", "neuclip", *more)
    assert_same_run(train(shards, tmp_path, "resumed", "neuclip", *more, stops=(3, 5)), whole_run)
    # Averaging the weights does not change the training itself.
    assert losses_of(whole_run) == losses_of(plain_run)
    whole, plain = final_state(whole_run), final_state(plain_run)["model"]
    assert differences(whole["model"][TRAINED_KEY], plain["state_dict"]) == []
    assert differences(whole["model"]["state_dict"], plain["state_dict"]) != []
    for name in ("whole", "resumed"):
        best = max(results_of(tmp_path / name), key=lambda line: (line[METRIC], -line["epoch"]))
        content = torch.load(tmp_path / name / "checkpoints" / "best.pt", weights_only=True)
        assert content.keys() == {"epoch", "name", "state_dict"}
        assert content["epoch"] == best["epoch"]
        stock_model(tmp_path / name / "checkpoints" / "best.pt", SMALL_MODEL)
    best = str(tmp_path / "whole" / "checkpoints" / "best.pt")
    with pytest.raises(UsageError, match=r"best.pt contains only the model.*--pretrained"):
        run([*small_command(shards, tmp_path, "other", "neuclip", *rates), "--resume", best])


def test_other_parameters_without_weight_decay_are_refused(shards, tmp_path):
    """Each group has as many parameters, but in another order, so Adam would use the moments of other parameters."""
    argv = small_command(shards, tmp_path, "run", "openclip", "--resume", "latest", "--wd-exclude")
    assert run([*argv, "*.mlp.c_fc.weight"], stop_after=3) == EXIT_AFTER_SIGTERM
    with pytest.raises(
        UsageError, match=r"a different run \(optimizer: .*c_fc.weight, run adamw --wd-exclude \*.mlp.c_proj"
    ):
        run([*argv, "*.mlp.c_proj.weight"])


def test_two_ranks_resume_and_stock_openclip_loads_the_average(shards, tmp_path):
    more = ["--model-ema-decay", "0.8", "--lr-text", "5e-4", "--equal-captions", "mask", "--draw-captions"]
    whole = train_on_two_ranks(shards, tmp_path, "fastclip", *more)
    stock_model(whole / "checkpoints" / "epoch_2.pt", SMALL_MODEL)
