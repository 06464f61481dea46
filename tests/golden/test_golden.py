"""Per-step losses of every loss for a fixed seed: a refactor changes no number.

Where a change is meant to change numbers, make the file anew and say why in the commit:
``python -m tests.golden.test_golden``. Add a new loss by its name: ``python -m tests.golden.test_golden NAME``.
"""

import json
import sys
import tempfile
from pathlib import Path

import pytest
import torch

import openclip_ext
from tests.training.runs import command, losses_of, make_shards, run

GOLDEN = Path(__file__).with_name("losses.json")
# Float32 on other machines adds up in another order; ten steps with small learning rates do not enlarge that much.
TOLERANCE = 2e-3
FLAGS = {
    # AdaGrad's first step has the size of its learning rate in every coordinate, whatever the gradient's: with 1.0 ten
    # steps turn a difference in the last digit into one in the first. The algorithm is the published one.
    "neuclip": ["--normalizer-lr", "0.01", "--no-verify-fit", "--temperature-scheme", "global"],
    "queueclip": ["--prototypes", "24"],
    # The one that contrasts images with texts; with two views it is simclr's relative.
    "sogclr": ["--views", "1"],
}


def per_step_losses(loss: str, shards: str, logs: Path) -> list[float]:
    torch.set_num_threads(1)
    argv = command(shards, logs, loss, loss, "--lr", "1e-4", *FLAGS.get(loss, []))
    assert run(argv) == 0
    return [value for _, value, _ in losses_of(logs / loss)]


@pytest.mark.parametrize("loss", openclip_ext.list_losses())
def test_losses_are_the_golden_ones(loss, shards, tmp_path):
    golden = json.loads(GOLDEN.read_text())
    assert loss in golden, "a new loss: make the golden file anew"
    assert per_step_losses(loss, shards, tmp_path) == pytest.approx(golden[loss], rel=TOLERANCE, abs=TOLERANCE)


def main(names: list[str]) -> None:
    """Write the golden values of some losses, or of all, from the code as it is."""
    golden = json.loads(GOLDEN.read_text()) if names else {}
    with tempfile.TemporaryDirectory() as folder:
        data = make_shards(Path(folder) / "shards")
        golden |= {loss: per_step_losses(loss, data, Path(folder)) for loss in names or openclip_ext.list_losses()}
    rounded = {loss: [round(value, 6) for value in values] for loss, values in golden.items()}
    lines = ",\n".join(f"  {json.dumps(loss)}: {json.dumps(values)}" for loss, values in rounded.items())
    GOLDEN.write_text(f"{{\n{lines}\n}}\n")


if __name__ == "__main__":
    main(sys.argv[1:])
