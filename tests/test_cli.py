"""The console program runs the modules of the package as ``python -m`` does."""

import importlib.util
import runpy
import subprocess
import sys

import pytest

from openclip_ext import cli
from openclip_ext.version import __version__


def openclip_ext(*arguments: str) -> subprocess.CompletedProcess:
    """The program in a process of its own."""
    program = [sys.executable, "-c", "from openclip_ext.cli import main; main()"]
    return subprocess.run([*program, *arguments], capture_output=True, text=True)


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
    cli.main([name, "--help", "x", name])
    assert calls == [(cli.COMMANDS[name].module, "__main__", True, ["--help", "x", name])]


def test_output_and_exit_status_are_the_commands(tmp_path):
    shown = openclip_ext("report", "--help")
    assert shown.returncode == 0 and "eval.report" in shown.stdout
    failed = openclip_ext("manifest", str(tmp_path / "none.tar"))
    module = subprocess.run(
        [sys.executable, "-m", "openclip_ext.data.manifest", str(tmp_path / "none.tar")], capture_output=True, text=True
    )
    assert failed.returncode == module.returncode != 0
    assert failed.stderr == module.stderr and "none.tar" in failed.stderr
