"""Recipes say what their sources say, the real command line takes them, and the SLURM jobs start them."""

import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from openclip_ext.losses.registry import OPTIONS, list_losses
from openclip_ext.training import recipes
from openclip_ext.training.errors import UsageError
from openclip_ext.training.flags import loss_options, parse

ROOT = Path(__file__).parents[2]
SLURM = ROOT / "scripts" / "slurm"
ALL = [(name, loss) for name in recipes.names() for loss in recipes.losses(name)]

# NeuCLIP, Table 1 (samples seen, vision encoder, batch) and Table 3 (lr, lr of τ, wd, warm-up, ρ), and the first
# columns of Tables 7 to 11 for OpenCLIP, FastCLIP, SigLIP and NeuCLIP.
NEUCLIP_TABLES = """
cc3m    100M RN50     1024 1e-3     1.25e-4 0.1 10000  6.5  21.84 24.74 22.19 25.08
cc12m   300M ViT-B-32 2048 4e-4     5e-5    0.1 10000  8.5  27.91 31.50 28.60 31.89
dfn14m  320M ViT-B-32 4096 5e-4     6.25e-5 0.2 500   11.0  37.78 38.45 37.23 39.16
dfn192m 1.3B ViT-B-16 5120 3.125e-4 3.9e-5  0.2 500   11.0  54.58 54.72 54.26 54.90
dfn1b   3.0B ViT-B-16 5120 3.125e-4 3.9e-5  0.2 500   11.0  56.25 56.68 56.32 57.34
"""


def as_number(text):
    return float(text.replace("M", "e6").replace("B", "e9"))


@pytest.mark.parametrize("row", NEUCLIP_TABLES.strip().splitlines(), ids=lambda row: row.split()[0])
def test_settings_and_results_are_those_of_neuclips_tables(row):
    name, seen, model, batch, lr, lr_tau, wd, warmup, rho, *averages = row.split()
    neuclip = recipes.get(name, "neuclip")
    assert neuclip.samples_seen == as_number(seen)
    assert neuclip.global_batch == int(batch)
    flags = dict(neuclip.openclip_flags)
    assert (flags["model"], flags["lr"], flags["wd"], flags["warmup"]) == (model, float(lr), float(wd), int(warmup))
    assert neuclip.loss_options["lr_tau"] == float(lr_tau)
    assert neuclip.loss_options["rho"] == float(rho)
    for loss, average in zip(("openclip", "fastclip", "siglip", "neuclip"), averages, strict=True):
        assert recipes.get(name, loss).results[0].value == float(average)


# FastCLIP's released commands: lr, lr_tau, ρ, γ, decay epochs, epochs.
FASTCLIP_COMMANDS = """
cc3m      1e-3 2e-4 6.5  0.2 18 37
cc12m     4e-4 1e-4 8.5  0.2 16 33
laion400m 2e-4 5e-5 16.0 0.8 10 30
"""

# AmorLIP, Section 4 and Appendix C: lr, f_d, T_online, α, ρ, ρ at the end, from which part of the run, epochs.
AMORLIP_SETTINGS = """
cc3m  1e-3 0.5 8 0.999 6.5 -8.0 0.75     30
cc12m 4e-4 1.0 1 0.92  8.5 -8.5 0.666667 33
"""


@pytest.mark.parametrize("row", FASTCLIP_COMMANDS.strip().splitlines(), ids=lambda row: row.split()[0])
def test_settings_of_fastclip_are_those_of_its_commands(row):
    name, *numbers = row.split()
    recipe = recipes.get(name, "fastclip")
    options, flags = recipe.loss_options, recipe.openclip_flags
    found = [flags["lr"], *(options[key] for key in ("lr_tau", "rho", "gamma", "gamma_decay_epochs")), flags["epochs"]]
    assert found == [float(number) for number in numbers]
    assert options["gamma_schedule"] == "cosine"


@pytest.mark.parametrize("row", AMORLIP_SETTINGS.strip().splitlines(), ids=lambda row: row.split()[0])
def test_settings_of_amorlip_are_those_of_its_appendix(row):
    name, *numbers = row.split()
    recipe = recipes.get(name, "amorlip")
    options, flags = recipe.loss_options, recipe.openclip_flags
    keys = ("width_factor", "fit_every", "ema_decay", "rho", "rho_end", "rho_switch")
    found = [flags["lr"], *(options[key] for key in keys), flags["epochs"]]
    assert found == pytest.approx([float(number) for number in numbers], rel=1e-6)
    shared = ("normalizer_updates", "target_every", "previous_weight", "normalizer_lr", "normalizer_objective")
    assert [options[key] for key in shared] == [3, 2, 0.8, 1e-3, "l2-log"]


@pytest.mark.parametrize(("name", "loss"), ALL)
def test_the_epochs_are_the_training_budget(name, loss):
    recipe = recipes.get(name, loss)
    seen = recipe.openclip_flags["epochs"] * recipe.dataset_size
    assert seen == pytest.approx(recipe.samples_seen, rel=0.04)


@pytest.mark.parametrize(("name", "loss"), ALL)
def test_the_command_line_takes_every_recipe(name, loss):
    recipe = recipes.get(name, loss)
    command = shlex.split(recipe.launch_command())
    args, choice = parse(command[command.index("openclip_ext.training.main") + 1 :])
    assert choice.name == loss
    for flag, value in recipe.openclip_flags.items():
        assert getattr(args, flag.replace("-", "_")) == value
    given = loss_options(args, choice)
    for option, value in recipe.loss_options.items():
        assert OPTIONS[option].check(value) == given[option] == value


def test_flags_given_explicitly_win():
    args, choice = parse(["--recipe", "cc3m", "--loss", "neuclip", "--lr", "1", "--rho=-2", "--restart-every", "none"])
    assert (args.lr, args.wd) == (1.0, 0.1)
    assert (choice.options["rho"], choice.options["restart_every"]) == (-2.0, None)


def test_both_names_of_a_loss_have_its_recipe():
    recipe = recipes.get("cc12m", "fastclip-v3")
    assert recipe.loss == "fastclip-v3"
    assert recipe.loss_options == recipes.get("cc12m", "fastclip").loss_options


@pytest.mark.parametrize(
    ("name", "loss", "message"),
    [
        ("cc3", "neuclip", "unknown recipe 'cc3' (did you mean 'cc3m'?); there are: coco, cc3m, cc12m"),
        (
            "dfn14m",
            "amorlip",
            "dfn14m has no published settings for the loss 'amorlip'; it has them for: openclip, siglip, fastclip, neuclip. "
            "Leave out --recipe",
        ),
        ("dfn14m", "neuclp", "(did you mean 'neuclip'?); it has them for: openclip, siglip, fastclip, neuclip"),
    ],
)
def test_what_is_not_there_is_refused_with_what_is(name, loss, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        recipes.get(name, loss)
    with pytest.raises(UsageError, match=re.escape(message)):
        parse(["--recipe", name, "--loss", loss])


def test_a_recipe_cannot_be_changed_by_who_reads_it():
    with pytest.raises(TypeError):
        recipes.get("cc3m", "neuclip").loss_options["rho"] = 0


def test_listing_recipes_needs_no_torch():
    code = (
        "import runpy, sys; sys.argv = ['recipes', 'cc3m', 'amorlip'];"
        "runpy.run_module('openclip_ext.training.recipes', run_name='__main__');"
        "sys.exit('torch' in sys.modules)"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert "DataComp average 24.11 (AmorLIP, Table 1)" in shown
    assert "--rho-end=-8.0" in shown


@pytest.mark.parametrize(("name", "loss"), [(name, loss) for name in recipes.names() for loss in list_losses()])
def test_a_loss_has_a_recipe_or_is_told_who_has(name, loss):
    if loss.replace("fastclip-v3", "fastclip") in recipes.losses(name):
        assert parse(["--recipe", name, "--loss", loss])[1].name == loss
        return
    others = ", ".join(recipes.losses(name))
    with pytest.raises(UsageError, match=f"no published settings for the loss '{loss}'.*it has them for: {others}"):
        parse(["--recipe", name, "--loss", loss])


def test_recipes_are_for_images_with_texts():
    with pytest.raises(UsageError, match="is for images with texts, and --views 2 contrasts images alone"):
        parse(["--recipe", "cc3m", "--loss", "sogclr", "--views", "2"])


def test_settings_of_tempnet_are_those_of_its_command():
    recipe = recipes.get("cc12m", "tempnet")
    options, flags = recipe.loss_options, recipe.openclip_flags
    found = [flags["lr"], options["lr_tau"], options["rho"], options["gamma"], flags["epochs"], recipe.global_batch]
    assert found == [8e-4, 3e-5, 9.5, 0.8, 33, 8 * 512]


def test_settings_of_cliplite_are_those_of_its_section_on_training():
    recipe = recipes.get("coco", "cliplite")
    assert recipe.global_batch == 1024
    assert recipe.samples_seen == 250_000 * 1024
    found = [recipe.openclip_flags[key] for key in ("momentum", "wd", "lookahead-steps", "warmup")]
    assert found == [0.9, 1e-4, 5, 10_000]
    assert [result.value for result in recipe.results] == [88.2, 55.3]
    assert recipes.get("coco", "openclip").openclip_flags["lr"] == 1e-4


def test_the_documentation_lists_every_recipe():
    page = (ROOT / "docs" / "recipes.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+)` \| (`.+?) \|", page, flags=re.MULTILINE)
    documented = {name: re.findall(r"`([\w-]+)`", listed) for name, listed in rows}
    assert documented == {name: recipes.losses(name) for name in recipes.names()}


# --- SLURM -----------------------------------------------------------------------------------------------------------

STUBS = {
    # Runs the task once, as the first node would.
    "srun": """#!/bin/bash
while [[ "$1" == --* ]]; do shift; done
SLURM_NODEID=0 exec "$@"
""",
    "scontrol": """#!/bin/bash
case "$1" in
    show) printf 'node-a\\nnode-b\\n' ;;
    requeue) echo "requeue $2" >>"$RECORD/events"; kill -TERM "$(cat "$RECORD/pid")" ;;
esac
""",
    "scancel": """#!/bin/bash
echo "scancel $*" >>"$RECORD/events"
kill -USR1 "$(cat "$RECORD/pid")"
""",
}

# Stands for torchrun with its trainers: notes its arguments, saves on SIGUSR1 and goes on, ends with 143 on SIGTERM.
TRAINER = """#!{python} -S
import os, pathlib, signal, sys, time
record = pathlib.Path(os.environ["RECORD"])

def note(event):
    with open(record / "events", "a") as file:
        file.write(event + "\\n")

signal.signal(signal.SIGUSR1, lambda *_: note("saved"))
signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
(record / "argv").write_text("\\0".join(sys.argv[1:]))
(record / "pid.new").write_text(str(os.getpid()))
(record / "pid.new").rename(record / "pid")
mode = os.environ["MODE"]
if mode == "run":
    time.sleep(60)
sys.exit(3 if mode == "crash" else 0)
"""


@pytest.fixture
def cluster(tmp_path, monkeypatch):
    """A job's environment on a cluster of stubs; returns the folder in which they note what happened."""
    for name, text in {**STUBS, "trainer": TRAINER.format(python=sys.executable)}.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    environment = {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "PYTHON": str(tmp_path / "trainer"),
        "RECORD": str(tmp_path),
        "MODE": "finish",
        "SAVE_SECONDS": "0.5",
        "SLURM_JOB_ID": "4711",
        "SLURM_JOB_NAME": "job",
        "SLURM_JOB_NODELIST": "node-[a-b]",
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_GPUS_ON_NODE": "4",
        "SLURM_SUBMIT_DIR": str(ROOT),
    }
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    return tmp_path


def run_job(script, *arguments):
    return subprocess.run(["bash", SLURM / script, *arguments], capture_output=True, text=True)


@pytest.mark.parametrize(("name", "loss"), ALL)
def test_every_recipe_has_a_job_script_whose_command_parses(name, loss, cluster):
    job = run_job(f"{name}.sh", loss, "SHARDS", "--precision", "amp_bf16")
    assert job.returncode == 0, job.stderr
    launcher, arguments = split_launch((cluster / "argv").read_text().split("\0"))
    assert launcher[:2] == ["-m", "torch.distributed.run"]
    assert {"--nnodes=2", "--node-rank=0", "--nproc-per-node=4", "--master-addr=node-a"} <= set(launcher)
    args, choice = parse(arguments)
    recipe = recipes.get(name, loss)
    assert (args.recipe, choice.name, args.train_data, args.precision) == (name, loss, "SHARDS", "amp_bf16")
    assert args.batch_size * 8 == recipe.global_batch
    assert (args.name, args.resume) == ("job-4711", "latest")


def split_launch(argv):
    at = argv.index("openclip_ext.training.main")
    return argv[: at - 1], argv[at + 1 :]


def test_the_generic_script_passes_the_trainers_flags_on(cluster):
    assert run_job("train.sh", "--name", "mine", "--aug-cfg", "scale=(0.4, 1.0)").returncode == 0
    _, arguments = split_launch((cluster / "argv").read_text().split("\0"))
    args, _ = parse(arguments)
    assert args.name == "mine"
    assert args.aug_cfg == {"scale": (0.4, 1.0)}


def test_a_batch_that_the_gpus_cannot_share_is_refused(cluster, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_NUM_NODES", "3")
    job = run_job("cc3m.sh", "neuclip", "SHARDS")
    assert job.returncode == 2
    assert "batch of 1024 cannot be shared by 12 GPUs" in job.stderr
    assert not (cluster / "argv").exists()


def test_at_the_time_limit_the_job_saves_and_is_requeued(cluster, monkeypatch):
    monkeypatch.setenv("MODE", "run")
    job = subprocess.Popen(["bash", SLURM / "train.sh"], stdout=subprocess.DEVNULL)
    wait_for(cluster / "pid")
    job.send_signal(signal.SIGUSR1)
    assert job.wait(timeout=30) == 143
    assert (cluster / "events").read_text().splitlines() == ["scancel --signal=USR1 4711", "saved", "requeue 4711"]


def test_a_run_that_fails_is_not_requeued(cluster, monkeypatch):
    monkeypatch.setenv("MODE", "crash")
    assert run_job("train.sh").returncode == 3
    assert not (cluster / "events").exists()


def wait_for(path, seconds=20.0):
    deadline = time.monotonic() + seconds
    while not path.exists():
        assert time.monotonic() < deadline, f"{path.name} never appeared"
        time.sleep(0.02)


@pytest.mark.parametrize("name", ["train", *recipes.names()])
def test_job_scripts_ask_slurm_for_the_signal_and_the_requeue(name):
    text = (SLURM / f"{name}.sh").read_text()
    directives = re.findall(r"^#SBATCH (\S+)$", text, flags=re.MULTILINE)
    assert {"--signal=B:USR1@120", "--requeue", "--open-mode=append", "--ntasks-per-node=1"} <= set(directives)
