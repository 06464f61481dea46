"""Bounds on the launches of a step, by loss.

``python -m tests.fake_cuda.bounds`` measures them and writes ``bounds.json`` anew: launches, which a change may exceed by
a twentieth, because versions of PyTorch differ by a few. Options are a loss's defaults, but what happens every few steps
happens in the measured ones, of which the most expensive counts.
"""

import functools
import json
from pathlib import Path
from typing import Any

from openclip_ext.losses.registry import list_losses, options_used_by

_FILE = Path(__file__).with_name("bounds.json")
_MARGIN = 1.05
_EVERY = {"fit_every": 2, "target_every": 2, "restart_every": 2}
# Steps in other ways than the plain one.
WAYS = [("fastclip", "solved"), ("fastclip", "chunks"), ("amorlip", "chunks"), ("neuclip", "chunks")]


def options(name: str) -> dict[str, Any]:
    """The options that a loss is measured with."""
    defaults = options_used_by(name)
    plain = {option: value for option, value in defaults.items() if option in ("normalizer_updates", "prototypes")}
    return plain | {option: value for option, value in _EVERY.items() if option in defaults}


@functools.cache
def measured() -> dict[str, dict[str, int]]:
    """Launches by kind (``loss`` alone, ``step``, a way of a step) and loss, as they were last measured."""
    return json.loads(_FILE.read_text(encoding="utf-8"))


def bound(kind: str, name: str) -> int:
    """The most launches that a loss, or a whole step with it, may have."""
    return int(measured()[kind][name] * _MARGIN)


def main() -> None:
    """Measure, and write the file."""
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
