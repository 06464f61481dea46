"""The commands in the documentation are valid, and its programs start from a clone's root, without PYTHONPATH."""

import argparse
import importlib
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from torch.distributed.run import get_args_parser

import openclip_ext
from openclip_ext.cli import program
from openclip_ext.training.flags import parse

ROOT = Path(__file__).parents[2]
PAGES = sorted(page for page in ROOT.rglob("*.md") if not str(page.relative_to(ROOT)).startswith("."))
PROGRAM = re.compile(r"python (-m (?:scripts|eval)\.[\w.]*\w|(?:scripts|examples)/[\w/]+\.py)")
PROGRAMS = sorted({program for page in PAGES for program in PROGRAM.findall(page.read_text(encoding="utf-8"))})
TRAINERS = (["openclip_ext.training.main"], ["openclip-ext", "train"], ["scripts/slurm/train.sh"])


def commands():
    """Yield each command in the pages: the page's name and the command's words. ``...`` stands for further words."""
    for page in PAGES:
        for block in re.findall(r"^ *```bash\n(.*?)^ *```", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE):
            for line in block.replace("\\\n", " ").splitlines():
                yield page.name, [word for word in shlex.split(line, comments=True) if word != "..."]


def split_training_command(words):
    """Return the launcher with its flags, and the trainer's flags; None if the command does not train."""
    for end in range(1, len(words) + 1):
        if any(words[:end][-len(trainer) :] == trainer for trainer in TRAINERS):
            return words[:end], words[end:]
    return None


COMMANDS = list(commands())
LAUNCHES = [(page, *parts) for page, words in COMMANDS if (parts := split_training_command(words))]


@pytest.mark.parametrize(
    ("page", "launch", "argv"), LAUNCHES, ids=lambda value: value if isinstance(value, str) else ""
)
def test_training_commands_parse(page, launch, argv):
    if launch[0] == "torchrun":
        # Without ``--``, torchrun reads ``--logs`` as an abbreviation of ``--logs-specs``.
        arguments = [*launch[1:], *(word for word in argv[:1] if word == "--"), "--logs", "runs"]
        assert get_args_parser().parse_args(arguments).training_script_args[-2:] == ["--logs", "runs"]
    words = argv[1:] if argv[:1] == ["--"] else argv
    # A custom loss must be imported. tests/losses/test_guide.py runs these commands.
    if not any(word.endswith(":METHOD") for word in words):
        parse(["--train-data", "x.tar", *words])


def test_other_commands_parse(monkeypatch):
    """compare and doctor are left out: they read their flags in two parts."""
    ours = [words[1:] for _, words in COMMANDS if words[:1] == ["openclip-ext"]]
    ours = [argv for argv in ours if argv[0] not in ("train", "compare", "doctor")]
    evaluations = [words[2:] for _, words in COMMANDS if words[:2] == ["python", "-m"] and words[2].startswith("eval.")]
    parse_args = argparse.ArgumentParser.parse_args

    def parse_only(parser, argv=None):
        parse_args(parser, argv)
        raise KeyboardInterrupt

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse_only)
    monkeypatch.setattr("sys.argv", ["openclip-ext"])
    for argv in ours:
        with pytest.raises(SystemExit) as ended:
            program.main(argv)
        assert ended.value.code == 130, argv
    assert len({name for name, *_ in ours}) == len(program.COMMANDS) - 3
    for module, *argv in evaluations:
        with pytest.raises(KeyboardInterrupt):
            importlib.import_module(module).main(argv)
    assert len({module for module, *_ in evaluations}) == 4


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_documented_program_starts(program):
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, *program.split(), "--help"]
    ran = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    if missing := re.search("No module named '(accelerate|datasets|lightning)'", ran.stderr):  # on Python 3.10
        pytest.skip(f"{missing[1]} is not installed")
    assert ran.returncode == 0, ran.stderr[-2000:]
    assert "usage:" in ran.stdout


def test_every_loss_has_a_row_in_the_page_on_choosing():
    text = (ROOT / "docs" / "choosing-a-loss.md").read_text(encoding="utf-8")
    rows = "\n".join(line for line in text.splitlines() if line.startswith("|"))
    assert [loss for loss in openclip_ext.list_losses() if f"`{loss}`" not in rows] == []
