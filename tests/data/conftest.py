"""Give each test its own cache folder."""

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Move the user's cache to a new folder. A manifest is written there if it cannot be written next to its shards."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
