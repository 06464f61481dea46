"""Per-step values of every loss with a fixed seed. They must not change when code is reorganized.

If numbers change on purpose, rewrite losses.json with ``python -m tests.golden.test_golden``, and give the reason in the
commit message. ``python -m tests.golden.test_golden NAME`` adds a new loss.
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
# Another machine may add float32 numbers in another order. Ten steps with small learning rates amplify this only slightly.
TOLERANCE = 2e-3
FLAGS = {
    # AdaGrad's first step changes every value by its learning rate. With the default of 1.0, rounding differences would become
    # large within ten steps.
    "neuclip": ["--normalizer-lr", "0.01"],
    "neuclip-paper": ["--normalizer-lr", "0.01"],
    "queueclip": ["--prototypes", "24"],
    # With one view, SogCLR compares images with texts. The variant with two views is similar to SimCLR.
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
    assert loss in golden, f"new loss, run: python -m tests.golden.test_golden {loss}"
    assert per_step_losses(loss, shards, tmp_path) == pytest.approx(golden[loss], rel=TOLERANCE, abs=TOLERANCE)


def main(names: list[str]) -> None:
    """Compute the golden values of the given losses (default: all) with the current code, and write them."""
    golden = json.loads(GOLDEN.read_text()) if names else {}
    with tempfile.TemporaryDirectory() as folder:
        data = make_shards(Path(folder) / "shards")
        golden |= {loss: per_step_losses(loss, data, Path(folder)) for loss in names or openclip_ext.list_losses()}
    rounded = {loss: [round(value, 6) for value in values] for loss, values in golden.items()}
    lines = ",\n".join(f"  {json.dumps(loss)}: {json.dumps(values)}" for loss, values in rounded.items())
    GOLDEN.write_text(f"{{\n{lines}\n}}\n")


if __name__ == "__main__":
    main(sys.argv[1:])
