"""The commands in the documentation are valid."""

import argparse
import re
import shlex
from pathlib import Path

import pytest
from torch.distributed.run import get_args_parser

import openclip_ext
from openclip_ext.cli import program
from openclip_ext.evaluation import download
from openclip_ext.evaluation.cliplite import editing, grounding, probes
from openclip_ext.evaluation.report import __main__ as report
from openclip_ext.training.flags import parse

ROOT = Path(__file__).parents[2]
PAGES = sorted([*(ROOT / "docs").rglob("*.md"), *ROOT.glob("*.md"), *(ROOT / "patches").glob("*.md")])
MODULE = "openclip_ext.training.main"
TRAINERS = ([MODULE], ["openclip-ext", "train"], ["scripts/slurm/train.sh"])


EVALUATIONS = {
    "eval.download": download.build_parser,
    "eval.report": report.build_parser,
    "eval.cliplite.probes": probes.build_parser,
    "eval.cliplite.editing": editing.build_parser,
    "eval.cliplite.grounding": grounding.build_parser,
}


def code_blocks(page, language):
    return re.findall(
        rf"^ *```{language}\n(.*?)^ *```", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE
    )


def training_commands(page):
    """Yield each training command of a page in two parts: the launcher with its flags, and the trainer's flags."""
    for block in code_blocks(page, "bash"):
        for line in block.replace("\\\n", " ").splitlines():
            words = [word for word in shlex.split(line, comments=True) if word != "..."]
            for end in range(1, len(words) + 1):
                if any(words[:end][-len(trainer) :] == trainer for trainer in TRAINERS):
                    yield words[:end], words[end:]
                    break


LAUNCHES = [(page.name, launch, argv) for page in PAGES for launch, argv in training_commands(page)]


def test_commands_of_the_evaluation_parse_and_each_is_shown():
    pages = [ROOT / "docs" / page for page in ("evaluation.md", "methods/cliplite.md")]
    lines = [line for page in pages for block in code_blocks(page, "bash") for line in block.splitlines()]
    commands = [shlex.split(line, comments=True) for line in lines if "-m eval." in line]
    for python, option, module, *arguments in commands:
        assert (python, option) == ("python", "-m")
        EVALUATIONS[module]().parse_args(arguments)
    assert {module for _, _, module, *_ in commands} == EVALUATIONS.keys()


@pytest.mark.parametrize(
    ("page", "launch", "argv"), LAUNCHES, ids=lambda value: value if isinstance(value, str) else ""
)
def test_training_commands_parse(page, launch, argv):
    """``...`` in a command stands for further flags."""
    if launch[0] == "torchrun":
        # Without ``--``, torchrun reads ``--logs`` as an abbreviation of ``--logs-specs``.
        arguments = [*launch[1:], *(word for word in argv[:1] if word == "--"), "--logs", "runs"]
        assert get_args_parser().parse_args(arguments).training_script_args[-2:] == ["--logs", "runs"]
    words = argv[1:] if argv[:1] == ["--"] else argv
    # A custom loss must be imported. tests/losses/test_guide.py runs these commands.
    if not any(word.endswith(":METHOD") for word in words):
        parse(["--train-data", "x.tar", *words])


def test_other_commands_of_the_program_parse(monkeypatch):
    """compare and doctor are left out: they read their flags in two parts."""
    blocks = [block.replace("\\\n", " ") for page in PAGES for block in code_blocks(page, "bash")]
    lines = [line for block in blocks for line in block.splitlines()]
    commands = [shlex.split(line, comments=True)[1:] for line in lines if line.startswith("openclip-ext ")]
    commands = [argv for argv in commands if argv[0] not in ("train", "compare", "doctor")]
    parse_args = argparse.ArgumentParser.parse_args

    def parse_only(parser, argv):
        parse_args(parser, argv)
        raise KeyboardInterrupt

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse_only)
    monkeypatch.setattr("sys.argv", ["openclip-ext"])
    for argv in commands:
        with pytest.raises(SystemExit) as ended:
            program.main(argv)
        assert ended.value.code == 130, argv
    assert len({name for name, *_ in commands}) == len(program.COMMANDS) - 3


def test_every_loss_has_a_row_in_the_page_on_choosing():
    text = (ROOT / "docs" / "choosing-a-loss.md").read_text(encoding="utf-8")
    rows = "\n".join(line for line in text.splitlines() if line.startswith("|"))
    assert [loss for loss in openclip_ext.list_losses() if f"`{loss}`" not in rows] == []
