"""Follow ``docs/add-your-own-loss.md`` in a copy of the repository: a test fails until each new loss has its own tests.

The code of the losses and of the tests comes from the guide and from ``examples/add_a_loss``.
"""

import re
import shutil
import subprocess
import sys
from pathlib import Path

from openclip_ext.evaluation.run_folder import read_config

ROOT = Path(__file__).parents[2]
GUIDE = (ROOT / "docs" / "add-your-own-loss.md").read_text(encoding="utf-8")
NEW_FILE = re.compile(r"`([\w/]+\.py)`:\n\n```python\n(.*?)```", flags=re.DOTALL)
AT_THE_END = re.compile(r"at the end of `([\w/]+\.py)`:\n\n```python\n(.*?)```", flags=re.DOTALL)
REPLACED = re.compile(r"`([\w/]+\.py)`:\n\n```diff\n-(.*?)\n\+(.*?)\n```", flags=re.DOTALL)
COMMANDS = re.compile(r"^python -m (openclip_ext\.training\.main .*)$", flags=re.MULTILINE)
EXAMPLES = ROOT / "examples" / "add_a_loss"
LOSSES = ["bilinear", "cooling", "decoupled", "slowclip"]


def test_the_guide_adds_four_losses_and_one_outside_of_the_package(tmp_path: Path) -> None:
    environment = {"PYTHONPATH": str(tmp_path), "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"}
    output = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}

    def python(*arguments: str) -> tuple[int, str]:
        done = subprocess.run([sys.executable, "-m", *arguments], cwd=tmp_path, env=environment, **output)
        return done.returncode, done.stdout

    for folder in ("openclip_ext", "tests", "eval", "examples"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    appended = dict(AT_THE_END.findall(GUIDE))
    files = {name: text for name, text in NEW_FILE.findall(GUIDE) if text not in appended.values()}
    for path in sorted(EXAMPLES.rglob("*.py")):
        name = path.relative_to(EXAMPLES).as_posix()
        assert f"(../examples/add_a_loss/{name})" in GUIDE
        files[name] = path.read_text(encoding="utf-8")
    assert sorted(Path(name).stem for name in files if name.startswith("openclip_ext/losses/")) == LOSSES

    for name, text in files.items():
        if name.startswith("openclip_ext/"):
            (tmp_path / name).write_text(text, encoding="utf-8")
    guard = "tests/losses/test_every_loss_is_tested.py"
    status, red = python("pytest", "-q", guard)
    assert status == 1, red
    failed = set(re.findall(r"FAILED .*::(\w+)", red))
    assert failed == {"test_every_loss_has_a_reference_case_or_a_test_file", "test_every_loss_has_golden_values"}
    assert all(name in red for name in LOSSES)

    for name, text in files.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    for name, text in appended.items():
        with open(tmp_path / name, "a", encoding="utf-8") as file:
            file.write(text)
    for name, old, new in REPLACED.findall(GUIDE):
        text = (tmp_path / name).read_text(encoding="utf-8")
        assert old in text
        (tmp_path / name).write_text(text.replace(old, new), encoding="utf-8")
    status, golden = python("tests.golden.test_golden", *LOSSES)
    assert status == 0, golden
    chosen = " or ".join(["test_every_loss_is_tested", "sharedclip", *LOSSES])
    names = ("against_references", "bilinear", "learning", "registry")
    tests = [f"tests/losses/test_{name}.py" for name in names]
    status, green = python("pytest", "-q", *tests, guard, "-k", chosen)
    assert status == 0, green

    smoke, resumed = (python(*command.split()) for command in COMMANDS.findall(GUIDE.replace("\\\n", " ")))
    assert smoke[0] == resumed[0] == 0, smoke[1] + resumed[1]
    assert len((tmp_path / "smoke" / "mine" / "metrics.jsonl").read_text().splitlines()) >= 2
    config = read_config(tmp_path / "smoke" / "mine")
    assert config["loss"]["name"] == "sharedclip:METHOD"

    own = "sharedclip:METHOD --shared-gamma 0.5"
    planned = python(
        *f"openclip_ext.diagnostics.plan --samples 64 --global-batch 16 --model demo-vit --loss {own}".split()
    )
    compared = python(*f"openclip_ext.compare no.tar --losses openclip,{own}".split())
    assert planned[0] == 0 and "none of the 1 files exists" in compared[1], planned[1] + compared[1]

    script = "import openclip_ext, sys\nfrom open_clip_train import params\nopenclip_ext.register()\n"
    script += "print(params.parse_args(sys.argv[1:]))"
    (tmp_path / "stock.py").write_text(script, encoding="utf-8")
    stock = python("stock", *f"--loss {own}".split())
    assert stock[0] == 0 and "{'shared_gamma': 0.5}" in stock[1], stock[1]
