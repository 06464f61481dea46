"""OpenCLIP's flags keep their meaning, and this package's flags are checked against the chosen loss."""

import json

import pytest

from openclip_ext.cli.errors import UsageError
from openclip_ext.cli.options import Option
from openclip_ext.losses.options import OPTIONS, SUMMARIES
from openclip_ext.training.flags import parse
from tests.training.commands import plan_of


def test_openclips_defaults_are_openclips():
    from open_clip_train.params import parse_args

    ours, theirs = parse(["--train-data", "x"]).flags, vars(parse_args(["--train-data", "x"]))
    assert {name: ours[name] for name in theirs} == {
        **theirs,
        "device": None,
        "csv_img_key": None,
        "csv_caption_key": None,
    }


def test_the_loss_takes_its_options_and_adams_eps_stays_adams():
    assert plan_of().loss.name == "openclip"
    assert plan_of("--siglip").loss.name == "siglip"
    config = plan_of("--loss", "fastclip", "--loss-eps", "1e-6", "--eps", "1e-7", "--rho", "8.5", "--epochs", "5")
    assert config.optimizer.eps == 1e-7
    assert [config.loss.options[name] for name in ("eps", "rho", "epochs")] == [1e-6, 8.5, 5]
    assert config.loss.given == {"eps": 1e-6, "rho": 8.5}


def test_our_flags_are_not_abbreviated():
    """OpenCLIP's parser accepts abbreviations, so it would read --loss as --loss-dist-impl."""
    assert plan_of("--loss", "neuclip").flags["loss_dist_impl"] is None
    assert plan_of("--batch-s", "8").loading.batch_size == 8  # OpenCLIP's own flags may be abbreviated


@pytest.mark.parametrize("name", ["lr", "image_backend"])
def test_options_of_an_own_loss_need_names_that_are_free(name, monkeypatch):
    monkeypatch.setitem(OPTIONS, name, Option(name, float, 0.1, "an option of an own loss"))
    message = f"an option of your loss has the name of another flag, --{name.replace('_', '-')}: rename it"
    with pytest.raises(UsageError, match=message):
        plan_of("--loss", "openclip")


def test_explicit_flags_win_over_the_recipe():
    config = plan_of("--recipe", "cc3m", "--loss", "neuclip-paper", "--lr", "3e-4", "--rho", "7")
    assert (config.model.name, config.optimizer.lr, config.loss.options["rho"]) == ("RN50", 3e-4, 7.0)
    assert "prototypes" in config.loss.given
    assert plan_of("--recipe", "cc3m", "--loss", "neuclip-paper", "--loss-option", "rho=7").loss.given["rho"] == 7.0
    loss = plan_of(
        "--recipe", "cc3m", "--loss", "neuclip-paper", "--normalizer", "mlp"
    ).loss  # an MLP has no prototypes
    assert loss.options["normalizer"] == "mlp"
    assert "prototypes" not in loss.options


def help_of(capsys, *argv):
    with pytest.raises(SystemExit) as stop:
        parse([*argv])
    assert stop.value.code == 0
    return capsys.readouterr().out


def test_the_help_has_every_flag_with_the_losses_defaults(capsys):
    short = help_of(capsys, "--help")
    assert set(SUMMARIES) <= set(short.split())
    assert {"--local-loss", "--train-data", "--aug-cfg", "--save-every-steps", "--recipe"} <= set(short.split())
    assert len(short.splitlines()) < 90 and max(map(len, short.splitlines())) <= 125
    whole = " ".join(help_of(capsys, "--help-all").split())
    for part in (
        "--prototypes INT number of prototypes (queueclip: queue length) [m]",
        "--local-loss calculate loss w/ local",
        "--fsdp shard",
    ):
        assert part in whole
    assert "main.py" not in whole and "--alpha-gradient" not in short + whole


def test_the_help_of_a_loss_describes_its_flags_only(capsys):
    shown = help_of(capsys, "--help", "--loss=neuclip")
    assert "--restart-every 500" in shown and "--gamma" not in shown and "--train-data" not in shown
    assert "none" in help_of(capsys, "--loss", "siglip", "-h")
    assert "Common flags" in help_of(capsys, "--help", "--loss", "unknown")


@pytest.mark.parametrize("joined", [True, False])
def test_an_option_of_the_loss_by_its_name(joined):
    words = ["prototypes=64", "restart_every=none", "normalizer-reset=false", "simultaneous=true"]
    flags = [part for word in words for part in ([f"--loss-option={word}"] if joined else ["--loss-option", word])]
    loss = plan_of("--loss", "neuclip", *flags).loss
    wanted = {"prototypes": 64, "restart_every": None, "normalizer_reset": False, "simultaneous": True}
    assert wanted.items() <= loss.options.items()
    assert loss.given == wanted


def test_the_names_of_openclips_main_branch_work():
    config = plan_of("--json-text-key", "long;short", "--visual-layer-decay=0.7")
    assert (config.data.caption_key, config.optimizer.image_layer_decay) == ("json:long;json:short", 0.7)
    assert plan_of("--text-key", "txt;caption").data.caption_key == "txt;caption"
    drawn = plan_of("--json-text-key", "long;short", "--json-text-key-probs", "0.7", "0.3")
    assert drawn.data.caption_weights == (0.7, 0.3) and drawn.loading.draw_captions
    compiled = plan_of("--torchcompile", "--torchcompile-strategy", "task").parallel
    assert compiled.compile and compiled.compile_loss
    with pytest.raises(UsageError, match="--torchcompile-strategy step"):
        plan_of("--torchcompile-strategy=step")


# --- effects of flags -------------------------------------------------------------------------------------------------


def test_a_file_with_a_masked_secret_needs_the_flag_again(tmp_path):
    url = "pipe:curl -u user:secret https://host/{000..003}.tar"
    config = parse(["--train-data", url, "--nam", "first", "--resume=latest", "--lr=1e-4"])
    assert "secret" not in str(config.words) and config.words[2:] == ("--lr=1e-4",)
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"typed": config.words}))
    with pytest.raises(UsageError, match="--train-data had a secret"):
        parse(["--config", str(file)])
    again = parse(["--config", str(file), "--train-data", url])
    assert again.flags == config.flags | {"name": None, "resume": None}


def test_flags_for_other_losses_are_named():
    ignored = plan_of("--loss", "neuclip", "--local-loss", "--loss-dist-impl", "shift", "--seed", "3")
    assert ignored.loss.without_effect == ("--local-loss", "--loss-dist-impl")
    assert plan_of("--loss", "siglip", "--loss-dist-impl", "shift").loss.without_effect == ()


def test_a_batch_is_shared_and_remote_copies_have_the_runs_name():
    config = plan_of(
        *["--global-batch", "128", "--batch-size", "32", "--remote-sync", "s3://b/", "--name", "run"], world_size=2
    )
    assert (config.loading.batch_size, config.loading.accum_freq, config.folder.remote) == (32, 2, "s3://b/run")
    of_node = plan_of("--log-local", rank=8, local_rank=0).folder
    assert (of_node.log_file, of_node.log_local_rank) == ("out-8", 0)
    small = plan_of("--global-batch", "48", "--batch-size", "32", world_size=4)
    assert (small.loading.batch_size, small.evaluation.batch_size) == (12, 32), "validation must not depend on the GPUs"
