"""Upper bounds on the kernel launches of a step with each loss.

``python -m tests.fake_cuda.bounds`` counts the launches and rewrites ``bounds.json``. Tests allow 5 % more, because versions
of PyTorch differ slightly. Options have their defaults, but fits and restarts happen every second step, so that they are
measured. The stored number is the largest of all steps except the first.
"""

import functools
import json
from pathlib import Path
from typing import Any

from openclip_ext.losses.registry import list_losses, options_used_by

_FILE = Path(__file__).with_name("bounds.json")
_MARGIN = 1.05
_EVERY = {"fit_every": 2, "target_every": 2, "restart_every": 2}
# Losses that are also measured with an additional way to compute a step.
WAYS = [("fastclip", "solved"), ("fastclip", "chunks"), ("amorlip", "chunks"), ("neuclip", "chunks")]


def options(name: str) -> dict[str, Any]:
    """Return the options with which a loss is measured."""
    defaults = options_used_by(name)
    plain = {option: value for option, value in defaults.items() if option in ("normalizer_updates", "prototypes")}
    return plain | {option: value for option, value in _EVERY.items() if option in defaults}


@functools.cache
def measured() -> dict[str, dict[str, int]]:
    """Return the stored numbers of launches, by kind (``loss`` alone, ``step``, or a way to compute a step) and loss."""
    return json.loads(_FILE.read_text(encoding="utf-8"))


def bound(kind: str, name: str) -> int:
    """Return the allowed number of launches for a kind of measurement and a loss."""
    return int(measured()[kind][name] * _MARGIN)


def main() -> None:
    """Count the launches of all losses and write ``bounds.json``."""
    from tests.fake_cuda import test_losses, test_steps

    names = list_losses()
    found: dict[str, dict[str, int]] = {
        "loss": {name: test_losses.launches_of(name) for name in names},
        "step": {name: test_steps.launches_of(name) for name in names},
    }
    for name, way in WAYS:
        found.setdefault(way, {})[name] = test_steps.launches_of(name, way)
    _FILE.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
