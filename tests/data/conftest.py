"""A separate cache for each test."""

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Set the user's cache, which receives manifests that cannot be written next to their shards."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
