"""accelerate, and ``ModelLoss``: resuming is bitwise exact, on any number of processes."""

import contextlib
import math
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("accelerate")

from accelerate import Accelerator

from openclip_ext import distributed
from openclip_ext.integrations.model_loss import ModelLoss, split_batch
from openclip_ext.losses.registry import create_loss
from tests.distributed.pool import RankPool, two_ranks
from tests.integrations import towers
from tests.integrations.towers import SAMPLES, stateful_loss
from tests.training.tiny import WIDTH, tiny_batch, tiny_captioner, tiny_model


def _example(folder: Path) -> tuple[list[str], list[str]]:
    """Run the example without a stop, and with a stop after the first epoch; return the last lines of both runs."""
    Accelerator(cpu=True)  # connects the processes

    def output(name: str, *more: str) -> list[str]:
        arguments = "--samples", "200", "--epochs", "2", "--output", str(folder / name), *more
        return towers.example("accelerate_loop.py", *arguments).splitlines()[-1:]

    whole, _ = output("whole"), output("stopped", "--stop-after", "1")
    return whole, output("stopped", "--resume")


def test_the_example_resumes_on_two_processes(tmp_path):
    with contextlib.closing(RankPool()) as pool:  # accelerate keeps the process group in global variables
        (whole, resumed), others = pool.run(_example, tmp_path, group=False)
    assert towers.PAIRS in whole[0] and whole == resumed and towers.PAIRS not in str(others)
    for name in ("model.safetensors", "optimizer.bin", "custom_checkpoint_0.pkl"):  # the last one is the loss
        assert (tmp_path / "whole" / name).read_bytes() == (tmp_path / "stopped" / name).read_bytes(), name


@pytest.mark.parametrize(
    ("accumulation", "repeats", "fix"), [(2, False, "do not accumulate"), (1, True, "drop_last=True")]
)
def test_loops_that_would_corrupt_the_state_are_refused(accumulation, repeats, fix):
    with pytest.raises(ValueError, match=fix):
        ModelLoss(stateful_loss(), tiny_model()).check_loop(accumulation, repeats)


def test_the_sigmoid_loss_starts_with_its_bias_and_trains_it():
    model, batch = tiny_model(), tiny_batch(0)
    with pytest.raises(ValueError, match=r"trains a bias: expected a model with the parameter logit_bias"):
        ModelLoss(create_loss("siglip"), model)
    model.logit_bias = torch.nn.Parameter(torch.zeros([]))
    loss = ModelLoss(create_loss("siglip"), model)
    assert model.logit_bias.item() == -10
    loss(model(batch["image"], batch["text"])).backward()
    assert model.logit_bias.grad.item() != 0


def test_equal_captions_reach_the_loss():
    model, batch = tiny_model(), tiny_batch(0)
    loss = ModelLoss(create_loss("openclip", embed_dim=WIDTH, equal_captions="mask"), model)
    batch |= {"positives": torch.zeros(8, dtype=torch.int64)}
    inputs, for_loss = split_batch({name: batch[name] for name in ("image", "text", "positives")})
    assert loss(model(**inputs), **for_loss).item() == 0  # no negatives, because all captions are equal


def test_what_does_not_fit_a_loss_is_refused():
    model = tiny_model()
    loss = ModelLoss(stateful_loss(), model)
    with pytest.raises(ValueError, match="logits: expected image_features"):
        loss({"logits": torch.zeros(2)})
    with pytest.raises(ValueError, match=r"separate_rate\(optimizer\)"):
        loss.step(torch.optim.AdamW(model.parameters()))
    towers_only = [parameter for name, parameter in model.named_parameters() if name != "logit_scale"]
    with pytest.raises(ValueError, match=r"separate_rate\(optimizer\)"):
        loss.step(torch.optim.AdamW(towers_only))
    with pytest.raises(ValueError, match="Sequential has no parameter logit_scale"):
        ModelLoss(stateful_loss(), torch.nn.Sequential(model))
    with pytest.raises(ValueError, match=r"would not train the captions of CoCa: use create_loss\('openclip'\)"):
        ModelLoss(stateful_loss(), tiny_captioner())
    with pytest.raises(ValueError, match="the saved loss has per-sample state of"):
        loss.load_state_dict(ModelLoss(create_loss("openclip"), tiny_model()).state_dict())


def _saved() -> tuple[bool, dict]:
    """Return whether loading a saved state restores this process's part, and the saved state of all processes."""
    rank, model = distributed.rank(), tiny_model()
    loss, other = (ModelLoss(stateful_loss(), model) for _ in range(2))
    batch = tiny_batch(rank)
    loss(model(batch["image"], batch["text"]), torch.arange(8) + 8 * rank)
    state = loss.state_dict()
    other.load_state_dict(state)
    own, restored = loss.loss.state_dict(), other.loss.state_dict()
    return all(torch.equal(restored[name], value) for name, value in own.items()), state


def test_a_loss_goes_on_with_any_number_of_processes():
    (is_same, state), _ = two_ranks().run(_saved)
    assert is_same
    one = ModelLoss(stateful_loss(), tiny_model())
    one.load_state_dict(state)
    for name, table in one.loss.tables().items():
        found = table.read(torch.arange(SAMPLES))
        assert torch.equal(found.isfinite().all(dim=0), torch.arange(SAMPLES) < 16)
        saved = torch.cat(state["tables"][name])
        torch.testing.assert_close(saved, table.rows(0, SAMPLES), rtol=0, atol=0, equal_nan=True)
    assert one.loss.calls == 1


def test_the_documented_launcher_starts_two_connected_processes(tmp_path):
    page = (Path(__file__).parents[2] / "docs" / "integrations.md").read_text()
    (command,) = re.findall(r"^\| accelerate \| `(torchrun .+? train\.py)`", page, re.MULTILINE)
    script = tmp_path / "train.py"
    # One text for one write, so that the lines of the processes do not mix.
    script.write_text(
        "from accelerate import Accelerator; print(f'processes: {Accelerator(cpu=True).num_processes}\\n', end='')"
    )
    words = ["torch.distributed.run", *command.split()[1:-1], str(script)]
    done = subprocess.run([sys.executable, "-m", *words], capture_output=True, text=True, timeout=300)
    assert done.stdout.count("processes: 2") == 2, done.stderr[-2000:]


def _with_own_average() -> tuple[float, float]:
    """Return the averaged gradient of the temperature, and the temperature's parameter after a step beyond its bounds."""
    loss = ModelLoss(create_loss("openclip"), tiny_model(), averages=False)
    optimizer = torch.optim.SGD([loss.logit_scale], lr=1.0)
    loss.check_loop(1, repeats=True)  # accepted, because the loss needs no index
    loss.before_step(optimizer)  # without a gradient
    loss.logit_scale.grad = torch.tensor(-10.0 * distributed.rank())
    loss.step(optimizer)
    return loss.logit_scale.grad.item(), loss.logit_scale.item()


def test_the_temperature_is_averaged_over_the_processes_and_bounded():
    assert two_ranks().run(_with_own_average) == [(-5.0, pytest.approx(math.log(100)))] * 2


def test_validation_is_in_full_precision_inside_autocast():
    loss = ModelLoss(stateful_loss(), tiny_model())
    features = dict(zip(("image_features", "text_features"), torch.randn(2, 8, WIDTH).bfloat16(), strict=True))
    scale = {"logit_scale": torch.tensor(100.0)}
    expected = loss({name: value.float() for name, value in features.items()} | scale, training=False)
    with torch.autocast("cpu", torch.bfloat16):
        assert loss(features | scale, training=False) == expected
