"""The console program runs the modules of the package as ``python -m`` does."""

import importlib.util
import runpy
import subprocess
import sys

import pytest

from openclip_ext import cli
from openclip_ext.version import __version__

_PROGRAM = "from openclip_ext.cli import main; main()"


def openclip_ext(*arguments: str) -> subprocess.CompletedProcess:
    """The program in a process of its own."""
    return subprocess.run([sys.executable, "-c", _PROGRAM, *arguments], capture_output=True, text=True)


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_every_command_is_a_module(name):
    module = cli.COMMANDS[name].module
    if importlib.util.find_spec(module).submodule_search_locations is not None:
        module += ".__main__"
    source = importlib.util.find_spec(module).loader.get_source(module)
    assert '__name__ == "__main__"' in source


def test_help_lists_the_commands_and_loads_nothing_heavy():
    code = "import sys; from openclip_ext.cli import main; main(['--help']); assert 'torch' not in sys.modules"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    for name, command in cli.COMMANDS.items():
        assert f"  {name} " in shown and command.summary in shown


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_the_help_of_a_command_loads_nothing_heavy(name):
    code = "import sys; from openclip_ext.cli import main; main(sys.argv[1:]); assert 'torch' not in sys.modules"
    shown = subprocess.run([sys.executable, "-c", code, name, "--help"], capture_output=True, text=True, check=True)
    assert shown.stdout.startswith(f"usage: openclip-ext {name} ")


def test_the_shell_completes_commands_flags_and_losses():
    script = subprocess.run([sys.executable, "-c", _PROGRAM, "--completion"], capture_output=True, text=True).stdout
    asked = {"2": "train --batch-s", "1": "tra", "3": "train --loss neuc"}
    code = f"""openclip-ext() {{ {sys.executable} -c '{_PROGRAM}' "$@"; }}
{script}
complete_word() {{ COMP_CWORD=$1; shift; COMP_WORDS=(openclip-ext "$@"); _openclip_ext; echo "${{COMPREPLY[@]}}"; }}
""" + "\n".join(f"complete_word {position} {words}" for position, words in asked.items())
    shown = subprocess.run(["bash", "-c", code], capture_output=True, text=True, check=True).stdout
    assert shown.split("\n")[:3] == ["--batch-size", "train", "neuclip"]


@pytest.mark.parametrize("argv", [[], ["-h"]])
def test_help_is_the_answer_to_nothing(argv, capsys):
    cli.main(argv)
    assert capsys.readouterr().out.startswith("usage: openclip-ext")


def test_version(capsys):
    cli.main(["--version"])
    assert capsys.readouterr().out == f"openclip-ext {__version__}\n"


def test_an_unknown_command_names_the_nearest(capsys):
    with pytest.raises(SystemExit) as stopped:
        cli.main(["estimate-error"])
    assert stopped.value.code == 2
    assert "Did you mean estimation-error?" in capsys.readouterr().err


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_a_command_gets_the_rest_of_the_line(name, monkeypatch):
    calls = []

    def run_module(module, run_name, alter_sys):
        calls.append((module, run_name, alter_sys, sys.argv[1:]))

    monkeypatch.setattr(sys, "argv", ["openclip-ext"])
    monkeypatch.setattr(runpy, "run_module", run_module)
    cli.main([name, "--flag", "x", name])
    assert calls == [(cli.COMMANDS[name].module, "__main__", True, ["--flag", "x", name])]


def test_output_and_exit_status_are_the_commands(tmp_path):
    shown = openclip_ext("report", "--output")
    assert shown.returncode == 2 and shown.stderr.startswith("usage: openclip-ext report")
    failed = openclip_ext("manifest", str(tmp_path / "none.tar"))
    module = subprocess.run(
        [sys.executable, "-m", "openclip_ext.data.manifest", str(tmp_path / "none.tar")], capture_output=True, text=True
    )
    assert failed.returncode == module.returncode != 0
    assert failed.stderr == module.stderr and "none.tar" in failed.stderr
