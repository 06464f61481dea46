"""Train a model on one icon data set and embed another data set, for the grid's ``--start`` and ``--reference``.

    python -m scripts.experiments.reference GRID.json --data icons-300k --of icons-11k --output reference

The grid must have one schedule and one setting. The output folder contains the weights ``model.pt``, and embeddings in the
format of ``openclip-ext embed``.
"""

import argparse
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import open_clip
import torch
from torch import Tensor

from openclip_ext.cli import command_line
from openclip_ext.compare.decoded import KnownTexts
from openclip_ext.data.reference import ABOUT, IMAGES, TEXTS
from openclip_ext.model_configs import add_model_configs
from openclip_ext.training.model import build_model
from scripts.experiments.grid import GridRun, contests, load_data, score


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument(
        "grid", type=Path, help="JSON file with a model, one schedule, one family with one setting, and a seed"
    )
    parser.add_argument("--data", type=Path, required=True, help="folder with the data to train on")
    parser.add_argument("--of", type=Path, required=True, help="folder with the data to embed")
    parser.add_argument("--output", type=Path, required=True, help="folder for the model and the embeddings")
    args = parser.parse_args(argv)
    add_model_configs()
    grid = json.loads(args.grid.read_text())
    data, of = load_data(args.data, grid["model"]), load_data(args.of, grid["model"])
    assert data.texts is not None and of.texts is not None and of.train is not None
    texts = (*data.texts.texts, *of.texts.texts)
    data = replace(data, texts=KnownTexts(texts, open_clip.get_tokenizer(grid["model"])))
    (contest,) = contests(grid, data.digest).values()
    ((run,),) = contest.families.values()
    training = GridRun(data, run, torch.device("cpu"))
    for step in training.run_steps():
        if step % 500 == 0:
            print(f"step {step} of {training.steps}", flush=True)
    images, captions = training.embed(of.train, of.train.captions())
    args.output.mkdir(parents=True, exist_ok=True)
    torch.save(whole_state(training), args.output / "model.pt")
    for name, values in ((IMAGES, images), (TEXTS, captions)):
        np.save(args.output / name, values.numpy().astype(np.float16))
    about = {
        "model": f"{run.model}, {run.schedule}, {run.family}",
        "samples": len(images),
        "width": images.shape[1],
        "data": None,
        "logit_scale": training.model.logit_scale.exp().item(),
        "test": score(training, of.test, of.names),
    }
    (args.output / ABOUT).write_text(json.dumps(about, indent=2) + "\n")
    print(json.dumps(about))


def whole_state(training: GridRun) -> dict[str, Tensor]:
    """Return the full model's weights. Tokens and positions that do not occur in the run's texts keep initial weights."""
    state = build_model(training.plan.model, training.device, training.run.seed).model.state_dict()
    for name, value in training.model.state_dict().items():
        if state[name].shape == value.shape:
            state[name] = value
        elif name.endswith("token_embedding.weight"):
            state[name][training.built.tokenizer.vocabulary] = value
        else:
            state[name][: len(value)] = value
    return state


if __name__ == "__main__":
    command_line.run(main)
