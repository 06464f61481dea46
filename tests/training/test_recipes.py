"""Recipes have sources and the papers' budgets, and the command line accepts all of them."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from openclip_ext.losses.options import OPTIONS
from openclip_ext.losses.registry import list_losses, options_used_by
from openclip_ext.training import recipes
from openclip_ext.training.model import loss_options
from tests.training.commands import plan_of

ROOT = Path(__file__).parents[2]
ALL = [(name, loss) for name in recipes.names() for loss in recipes.losses(name)]


@pytest.mark.parametrize(("name", "loss"), ALL)
def test_a_recipe_has_sources_and_the_papers_budget_and_is_taken_by_the_command_line(name, loss):
    recipe = recipes.get(name, loss)
    assert recipe.source
    assert recipe.results or recipe.notes or "command" in recipe.source
    seen = recipe.openclip_flags["epochs"] * recipe.dataset_size
    assert seen == pytest.approx(recipe.samples_seen, rel=0.04)
    command = shlex.split(recipe.launch_command())
    config = plan_of(*command[command.index("--") + 1 :])
    assert config.loss.name == loss
    for flag, value in recipe.openclip_flags.items():
        assert config.flags[flag.replace("-", "_")] == value
    for option, value in recipe.loss_options.items():
        assert OPTIONS[option].check(value) == config.loss.options[option] == value


@pytest.mark.parametrize("name", list_losses())
def test_the_training_program_and_create_loss_have_the_same_defaults(name):
    of_program = loss_options(plan_of("--loss", name).loss, 10, pretrained=False)
    of_run = {"epochs": of_program["epochs"]} if "epochs" in of_program else {}
    assert of_program == options_used_by(name) | of_run


def test_a_pretrained_model_keeps_a_learned_temperature():
    for more, scheme in (([], "global"), (["--temperature-scheme", "solved"], "solved")):
        options = loss_options(plan_of("--loss", "neuclip", *more).loss, 10, pretrained=True)
        assert options["temperature_scheme"] == scheme and options["verify_fit"]


def test_a_pretrained_model_takes_the_flags_of_a_learned_temperature():
    loss = plan_of("--loss", "neuclip", "--pretrained", "start.pt", "--lr-tau", "1e-3", "--epochs", "3").loss
    options = loss_options(loss, 10, pretrained=True)
    assert (options["temperature_scheme"], options["lr_tau"], options["epochs"]) == ("global", 1e-3, 3)
    with pytest.raises(ValueError, match="--lr-tau: not used by the loss 'neuclip'"):
        plan_of("--loss", "neuclip", "--lr-tau", "1e-3")
    with pytest.raises(
        ValueError, match=r"--temperature-queue: not used .*global', only with --temperature-scheme solved"
    ):
        plan_of("--loss", "neuclip", "--pretrained", "start.pt", "--temperature-queue", "512")


def test_listing_recipes_needs_no_torch():
    code = (
        "import runpy, sys; sys.argv = ['recipes', 'cc3m', 'amorlip'];"
        "runpy.run_module('openclip_ext.training.recipes', run_name='__main__');"
        "sys.exit('torch' in sys.modules)"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert "DataComp average 24.11 (AmorLIP, Table 1)" in shown
    assert "--rho-end=-8.0" in shown


def test_the_documentation_lists_every_recipe():
    page = (ROOT / "docs" / "recipes.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `([\w-]+)` \| (`.+?) \|", page, flags=re.MULTILINE)
    documented = {name: re.findall(r"`([\w-]+)`", listed) for name, listed in rows}
    assert documented == {name: recipes.losses(name) for name in recipes.names()}
