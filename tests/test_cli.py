"""The program ``openclip-ext`` runs the package's modules like ``python -m``."""

import importlib
import os
import re
import shlex
import subprocess
import sys

import pytest

from openclip_ext import __version__
from openclip_ext.cli import program as cli

_PROGRAM = "from openclip_ext.cli.program import main; main()"


def python(*arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True)


def test_the_help_of_the_program_and_of_training_load_nothing_heavy():
    code = """
import contextlib, sys
from openclip_ext.cli.program import main
main(["--help"])
with contextlib.suppress(SystemExit):
    main(["train", "--help"])
try:
    main(["train", "--train-data", "x.tar", "--loss", "nonsense"])
finally:
    assert not sys.modules.keys() & {"torch", "open_clip", "webdataset", "pandas", "numpy"}
"""
    result = python("-c", code)
    assert result.returncode == 2 and result.stderr.startswith("error: unknown loss 'nonsense'"), result.stderr
    assert "usage: openclip-ext train" in result.stdout
    for name, command in cli.COMMANDS.items():
        assert f"  {name} " in result.stdout and command.summary in result.stdout


@pytest.mark.parametrize("name", [name for name in cli.COMMANDS if name != "train"])
def test_every_command_has_its_help(name, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [*sys.argv])
    with pytest.raises(SystemExit) as stopped:
        cli.main([name, "--help"])
    assert stopped.value.code == 0
    assert f"usage: openclip-ext {name} " in capsys.readouterr().out


def test_the_shell_completes_commands_flags_and_losses():
    script = python("-c", _PROGRAM, "--completion").stdout
    asked = {"2": "train --batch-s", "1": "tra", "3": "train --loss neuc"}
    code = f"""openclip-ext() {{ {shlex.quote(sys.executable)} -c '{_PROGRAM}' "$@"; }}
{script}
complete_word() {{ COMP_CWORD=$1; shift; COMP_WORDS=(openclip-ext "$@"); _openclip_ext; echo "${{COMPREPLY[@]}}"; }}
""" + "\n".join(f"complete_word {position} {words}" for position, words in asked.items())
    shown = subprocess.run(["bash", "-c", code], capture_output=True, text=True, check=True).stdout
    assert shown.split("\n")[:3] == ["--batch-size", "train", "neuclip neuclip-paper"]


def test_help_is_the_answer_to_nothing_and_there_is_a_version(capsys):
    cli.main([])
    assert capsys.readouterr().out.startswith("usage: openclip-ext")
    cli.main(["--version"])
    assert capsys.readouterr().out == f"openclip-ext {__version__}\n"


@pytest.mark.parametrize("command", ["compare x.tar", "train --dataset-type synthetic --model demo-resnet"])
def test_ctrl_c_during_the_import_of_numpy_is_not_lost(command):
    """It would be lost if torch imported numpy: torch ignores all errors of this import."""
    code = (
        """
import sys
class Interrupting:
    def find_spec(name, *_):
        if name == "numpy.lib":
            sys.meta_path.remove(Interrupting)
            raise KeyboardInterrupt
sys.meta_path.insert(0, Interrupting)
"""
        + _PROGRAM
    )
    stopped = python("-c", code, *command.split())
    assert stopped.returncode == 130 and stopped.stderr.endswith("stopped\n")


def test_an_unknown_command_names_the_nearest(capsys):
    with pytest.raises(SystemExit) as stopped:
        cli.main(["estimate-error"])
    assert stopped.value.code == 2
    assert "did you mean estimation-error?" in capsys.readouterr().err


@pytest.mark.parametrize(
    "after", ["train --help | head -1", "train --help-all | head -1", "losses | head -1", "losses >&-"]
)
def test_a_reader_that_goes_and_a_closed_output_are_no_errors(after):
    command = f"{shlex.quote(sys.executable)} -c '{_PROGRAM}' {after}"
    result = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
    assert (result.returncode, result.stderr) == (0, "") and bool(result.stdout) == ("head" in after)


def test_output_and_exit_status_are_the_commands(tmp_path):
    shown = python("-c", _PROGRAM, "manifest", "--workers")
    assert (
        shown.returncode == 2 and shown.stderr.startswith("error: argument --workers") and shown.stderr.count("\n") == 1
    )
    failed = python("-W", "always", "-c", _PROGRAM, "manifest", str(tmp_path / "none.tar"))
    module = python("-m", "openclip_ext.data.manifest", str(tmp_path / "none.tar"))
    assert failed.returncode == module.returncode != 0
    assert failed.stderr == module.stderr and "none.tar" in failed.stderr


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["report", "run", "--output", os.fsdecode(b"\xff")], "udcff' is not UTF-8.*: rename"),
        (["plan", "--samples=9", "--loss="], "--loss=: the value is empty: remove the flag"),
        (["plan", "--samples=inf"], "--samples: inf: expected a positive whole number"),
        (["plan", "--samples=ten"], "--samples: ten: expected a positive whole number"),
        (["inspect", "run", "--workers=-1"], "--workers: -1: expected a positive whole number"),
        (["evaluate", "--workers=-1"], "--workers: -1: expected a positive whole number"),
        (["evaluate", "--model=x", "--data-dir="], "--data-dir=: the value is empty: remove the flag"),
        (["search", "embeddings", ""], "the argument after 'embeddings': the value is empty"),
    ],
)
def test_a_wrong_word_is_one_line_and_status_2(argv, said, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [*sys.argv])
    with pytest.raises(SystemExit) as stopped:
        cli.main(argv)
    assert stopped.value.code == 2 and re.search(said, capsys.readouterr().err.splitlines()[-1])


@pytest.mark.parametrize(
    ("module", "argv"),
    [
        ("openclip_ext.data.manifest.__main__", "x.tar --output gs://b/m.json"),
        ("openclip_ext.data.shapes.__main__", "--output s3://b/shapes --num-samples 4"),
        ("openclip_ext.diagnostics.estimation_error", "run --plot file:///b/error.png"),
        ("openclip_ext.compare.comparison", "x.tar --output s3://b/compare --model demo-vit"),
        ("openclip_ext.export.__main__", "x.pt --output s3://b/exported"),
        ("eval.datacomp", "--model demo-vit --data-dir d --output-dir s3://b/results"),
        ("eval.download", "--data-dir s3://b/data"),
        ("eval.download", "--data-dir=~/data"),
        ("openclip_ext.compare.comparison", "x.tar --output=~/compare --model demo-vit"),
        ("openclip_ext.export.__main__", "x.pt --output="),
    ],
)
def test_no_command_makes_a_folder_of_a_url(module, argv, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with pytest.raises((SystemExit, ValueError)) as stopped:
        importlib.import_module(module).main(argv.split())
    told = str(stopped.value) if isinstance(stopped.value, ValueError) else capsys.readouterr().err
    assert re.search("is a URL: expected a local path|did not replace ~. Write .HOME|the path is empty", told)
    assert list(tmp_path.iterdir()) == []
