"""The commands of docs/evaluation-more.md and docs/methods/cliplite.md can be typed in."""

import re
import shlex
from pathlib import Path

import pytest

from eval import download
from eval.cliplite import editing, grounding, probes
from eval.report import __main__ as report

ROOT = Path(__file__).parents[2]
PAGES = [(ROOT / "docs" / page).read_text(encoding="utf-8") for page in ("evaluation-more.md", "methods/cliplite.md")]
BLOCKS = [block for page in PAGES for block in re.findall(r"```bash\n(.*?)```", page, flags=re.DOTALL)]
COMMANDS = [line for block in BLOCKS for line in block.splitlines() if "-m eval." in line]
PARSERS = {
    "eval.download": download.build_parser,
    "eval.report": report.build_parser,
    "eval.cliplite.probes": probes.build_parser,
    "eval.cliplite.editing": editing.build_parser,
    "eval.cliplite.grounding": grounding.build_parser,
}


@pytest.mark.parametrize("command", COMMANDS)
def test_command_parses(command: str) -> None:
    words = shlex.split(command, comments=True)
    assert words[:2] == ["python", "-m"]
    PARSERS[words[2]]().parse_args(words[3:])


def test_every_command_is_shown() -> None:
    words = {word for command in COMMANDS for word in shlex.split(command, comments=True)}
    assert set(PARSERS) <= words
