"""The benchmark of the evaluation: both ways score alike, and the counts are DataComp's."""

import importlib.util
import json
import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from eval.tasks import TASKS
from tests.eval import datasets


@pytest.fixture(scope="module")
def benchmark() -> Iterator[ModuleType]:
    path = Path(__file__).parents[2] / "scripts" / "bench" / "evaluation.py"
    sys.path.insert(0, str(path.parent))  # where a script finds its neighbors
    spec = importlib.util.spec_from_file_location("bench_evaluation", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    level = logging.root.level
    yield module
    logging.root.setLevel(level)  # it silences the libraries
    sys.path.remove(str(path.parent))


def test_both_ways_do_the_same(benchmark, tiny_folder, tmp_path, monkeypatch):
    output = tmp_path / "result.json"
    command = f"evaluation.py --model {datasets.TINY_MODEL} --tasks cifar10 imagenet-a wilds/fmow --scale 3000"
    command += f" --repeats 1 --workers 1 --device cpu --output {output}"
    monkeypatch.setattr(sys, "argv", command.split())
    benchmark.main()
    result = json.loads(output.read_text())
    assert result["samples"] == 8 * 3
    upstream, ours = (result["ways"][name][0] for name in ("upstream", "ours"))
    assert ours["acc1"] == pytest.approx(upstream["acc1"])
    # One class of each, with CIFAR-10's 18 templates, ImageNet's 80, and one stand-in.
    assert (ours["prompts"], upstream["prompts"]) == (99, 99)
    assert [part for part in ours["seconds"] if part.endswith("model")] == ["all: model"]
    assert len([part for part in upstream["seconds"] if part.endswith("model")]) == 3
    assert result["ratio"]["min"] == result["ratio"]["median"] == result["ratio"]["max"]


def test_reading_alone(benchmark, tiny_folder, tmp_path, monkeypatch):
    output = tmp_path / "result.json"
    command = f"evaluation.py --model {datasets.TINY_MODEL} --tasks cifar10 --scale 500 --shards 1 --reading"
    monkeypatch.setattr(sys, "argv", [*command.split(), "--repeats", "2", "--device", "cpu", "--output", str(output)])
    benchmark.main()
    result = json.loads(output.read_text())
    assert result["samples"] == 20 and len(result["ways"]["ours"]) == 2
    assert set(result["ways"]["upstream"][0]["seconds"]) == {"cifar10: reading"}
    assert result["ratio"]["min"] <= result["ratio"]["median"] <= result["ratio"]["max"]


def test_the_numbers_at_datacomps_size(benchmark):
    variants, classification = benchmark.PROJECTED.values()
    assert sum(task.size for task in variants) == 168963
    assert sum(map(benchmark.prompts, variants)) == 80 * (3 * 1000 + 3 * 200 + 113)
    assert len(classification) == 35
    assert all(task.classes == len(benchmark.texts(task)[0]) for task in classification)
    assert benchmark.prompts(TASKS["vtab/pets"]) == 37


def test_work_is_scaled_up_part_by_part(benchmark):
    """Twice the time of an image, a prompt and a load: twice the hours."""
    tasks = [TASKS["vtab/pets"], TASKS["cifar10"]]

    def way(scale: float, loads: int):
        way = benchmark.Way(benchmark.Settings(), Path())
        way.samples, way.prompts = 10, 5
        way.clock.seconds = {("a", "images"): 10 * scale, ("a", "texts"): 5 * scale}
        way.clock.seconds |= {(f"task {number}", "model"): scale for number in range(loads)}
        return way

    result = benchmark.at_datacomps_size(tasks, [{"upstream": way(2, 2), "ours": way(1, 1)}])
    images, prompts = 3669 + 10000, 37 + 10 * 18
    assert result["hours"]["upstream"]["median"] == pytest.approx(2 * (images + prompts + 2) / 3600)
    assert result["hours"]["ours"]["median"] == pytest.approx((images + prompts + 1) / 3600)
