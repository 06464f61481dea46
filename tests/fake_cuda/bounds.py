"""Bounds on the launches of a step, by loss.

``python -m tests.fake_cuda.bounds`` measures them and writes ``bounds.json`` anew: launches, which a change may exceed by
a twentieth, because versions of PyTorch differ by a few.
"""

import functools
import json
from pathlib import Path

_FILE = Path(__file__).with_name("bounds.json")
_MARGIN = 1.05


@functools.cache
def measured() -> dict[str, dict[str, int]]:
    """Launches by kind (``loss`` alone, ``step``) and loss, as they were last measured."""
    return json.loads(_FILE.read_text(encoding="utf-8"))


def bound(kind: str, name: str) -> int:
    """The most launches that a loss, or a whole step with it, may have."""
    return int(measured()[kind][name] * _MARGIN)


def main() -> None:
    """Measure, and write the file."""
    from openclip_ext.losses.registry import list_losses
    from tests.fake_cuda import test_losses, test_steps

    names = list_losses()
    found = {
        "loss": {name: test_losses.launches_of(test_losses.ALL[name].create()) for name in names},
        "step": {name: test_steps.launches_of(name) for name in names},
    }
    _FILE.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    for name in names:
        print(f"{name:14} {found['loss'][name]:5} {found['step'][name]:5}")


if __name__ == "__main__":
    main()
