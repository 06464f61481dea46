"""``openclip-ext report`` draws the training curves of several runs."""

import json

import numpy as np
from PIL import Image

from openclip_ext.evaluation.report.__main__ import main
from openclip_ext.evaluation.report.curves import plot
from openclip_ext.evaluation.training_log import read_log
from openclip_ext.pages.charts import PALETTE


def write_run(folder, steps, **extra):
    folder.mkdir(parents=True)
    common = {"chance": 4.16, "temperature": 0.07, **extra}
    records = [
        {"step": step, "samples": 64 * (step + 1), "loss": 1.0 / (step + 1), "infonce": 4 - step / 100, **common}
        for step in steps
    ]
    records.append({"step": steps[-1], "epoch": 1, "evaluation": {"top1": 0.5}})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))


def test_curves_of_several_runs_are_drawn(tmp_path):
    quantiles = {"alpha_q10": -2.0, "alpha_q50": -1.0, "alpha_q90": 0.0}
    quantiles |= {"temperature_min": 0.05, "temperature_max": 0.09}
    write_run(tmp_path / "neuclip", range(0, 200, 20), **quantiles)
    write_run(tmp_path / "openclip", range(0, 100, 20))
    with (tmp_path / "neuclip" / "metrics.jsonl").open("a") as log:
        log.write('{"step": 99, "lo')  # the run was killed during this write
    main([*(str(tmp_path / name) for name in ("neuclip", "openclip")), "--output", str(tmp_path / "report")])
    pixels = np.asarray(Image.open(tmp_path / "report" / "curves.png").convert("RGB")).reshape(-1, 3)
    colors = [[int(color[place : place + 2], 16) for place in (1, 3, 5)] for color in PALETTE[:2]]  # of the two runs
    assert all((np.abs(pixels - np.array(color)).max(axis=1) < 3).sum() > 500 for color in colors)


def test_the_legend_has_a_run_whose_name_starts_with_an_underscore(tmp_path):
    write_run(tmp_path / "_first", range(3))
    plot({"_first": [read_log(tmp_path / "_first")]}, tmp_path / "x.svg")
    assert "_first" in (tmp_path / "x.svg").read_text()
