"""Damaged tars: a hundred of the mutations of scripts/fuzz_tars.py, which runs thousands by hand."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

from openclip_ext.data import shards


@pytest.fixture(scope="module")
def fuzz_tars() -> ModuleType:
    path = Path(__file__).parents[2] / "scripts" / "fuzz_tars.py"
    spec = importlib.util.spec_from_file_location("fuzz_tars", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules["fuzz_tars"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_damaged_tars_neither_hang_nor_crash_nor_lose_silently(fuzz_tars: ModuleType, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(shards, "_STREAM_ATTEMPTS", 1)
    result = fuzz_tars.fuzz(range(100), seed=1)
    assert result.failures == []
    assert sum(result.outcomes.values()) == 100
    # The mutations are no mere noise: most lose something, some nothing.
    assert result.outcomes["lost"] > 50
    assert result.outcomes["survived"] > 10
    assert result.undercounted <= 1


def test_the_fuzz_sees_what_is_silent(fuzz_tars: ModuleType, monkeypatch: pytest.MonkeyPatch):
    """A scan that forgot what it has lost would be found."""
    from openclip_ext.data.manifest import Manifest

    monkeypatch.setattr(shards, "_STREAM_ATTEMPTS", 1)
    monkeypatch.setattr(Manifest, "num_lost", 0)
    result = fuzz_tars.fuzz(range(40), seed=1)
    assert any("missing without a word" in reason for _, _, reason in result.failures)
