"""A new loss fails these tests until tests for it are added (docs/add-your-own-loss.md).

Other tests automatically include every registered loss: in two processes, sharded, and resumed (tests/training).
"""

import json
from dataclasses import replace
from pathlib import Path

from openclip_ext.losses.method import Composed, Method
from openclip_ext.losses.registry import METHODS
from tests.losses.cases import CASES

# The test files of losses that are not composed of parts.
OWN_TESTS = {"openclip": "test_openclip.py", "siglip": "test_openclip.py", "cliplite": "test_cliplite.py"}


# Losses of this package. A test may have registered a loss of another module, ``module:METHOD``.
NAMES = {name for name in METHODS if ":" not in name}


def _unnamed(name: str) -> Method:
    """Return a loss's method, which is then equal for all names under which the loss is registered."""
    return replace(METHODS[name], name="", summary="")


def test_every_loss_has_a_reference_case_or_a_test_file() -> None:
    tested = [_unnamed(case.loss) for case in CASES.values() if case.loss in METHODS]
    own = {name for name in OWN_TESTS if not isinstance(METHODS[name], Composed)}
    missing = {name for name in NAMES if _unnamed(name) not in tested} - own
    assert not missing, (
        f"add to tests/losses/cases.py a case with a naive float64 reference for: {sorted(missing)}; or, if a loss is not "
        "composed of parts, a test file to OWN_TESTS"
    )
    assert [file for file in OWN_TESTS.values() if not Path(__file__).with_name(file).is_file()] == []


def test_every_loss_has_golden_values() -> None:
    golden = json.loads((Path(__file__).parents[1] / "golden" / "losses.json").read_text())
    missing = NAMES - golden.keys()
    assert not missing, f"run: python -m tests.golden.test_golden {' '.join(sorted(missing))}"
