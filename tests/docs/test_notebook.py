"""The notebook of fine-tuning runs from its first cell to its last, without a network."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

NOTEBOOK = Path(__file__).parents[2] / "examples" / "fine_tuning.ipynb"


def test_the_notebook_runs_and_draws_its_picture(tmp_path):
    pytest.importorskip("matplotlib")
    cells = [cell for cell in json.loads(NOTEBOOK.read_text())["cells"] if cell["cell_type"] == "code"]
    assert not any(cell["outputs"] for cell in cells), "the notebook is stored without outputs"
    (tmp_path / "cells.py").write_text("\n\n".join("".join(cell["source"]) for cell in cells))
    paths = f"{NOTEBOOK.parents[1]}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    environment = os.environ | {"MPLBACKEND": "Agg", "HF_HUB_OFFLINE": "1", "PYTHONPATH": paths}
    done = subprocess.run(
        [sys.executable, "cells.py"], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "<- chosen" in done.stdout and (tmp_path / "own-and-kept.png").is_file()
    assert "data:image/jpeg" in (tmp_path / "embeddings" / "search.html").read_text()
