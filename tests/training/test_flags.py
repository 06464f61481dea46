"""The command line: OpenCLIP's flags keep their meaning, ours are checked against the chosen loss."""

import pytest

from openclip_ext.losses.options import HARD_SHARE
from openclip_ext.losses.registry import OPTIONS
from openclip_ext.options import flag_fields, python_name
from openclip_ext.training import flag_table
from openclip_ext.training.config import FLAG_GROUPS
from openclip_ext.training.errors import UsageError
from openclip_ext.training.flags import parse
from openclip_ext.training.parser import build_parser


def test_the_loss_is_openclips_or_the_one_that_openclips_flag_says():
    args, loss = parse(["--siglip"])
    assert loss.name == args.loss == "siglip"
    assert parse([])[1].name == "openclip"


def test_openclips_defaults_are_openclips():
    from open_clip_train.params import parse_args

    ours, theirs = vars(parse([])[0]), vars(parse_args([]))
    assert {name: ours[name] for name in theirs} == theirs


def test_the_loss_takes_its_options_and_adams_eps_stays_adams():
    args, loss = parse(["--loss", "fastclip", "--loss-eps", "1e-6", "--eps", "1e-7", "--rho", "8.5", "--epochs", "5"])
    assert args.eps == 1e-7
    assert (loss.options["eps"], loss.options["rho"], loss.options["epochs"]) == (1e-6, 8.5, 5)
    assert loss.given == {"eps", "rho"}


def test_none_is_a_value_and_not_given_is_not():
    _, loss = parse(["--loss", "neuclip", "--restart-every", "none"])
    assert loss.given == {"restart_every"}
    assert (loss.options["restart_every"], loss.options["prototypes"]) == (None, 4096)


def test_our_flags_are_not_abbreviated():
    """OpenCLIP's parser would take --loss for --loss-dist-impl."""
    args, _ = parse(["--loss", "neuclip"])
    assert args.loss_dist_impl is None
    with pytest.raises(UsageError, match="--prototyp is none of OpenCLIP's flags and the beginning of --prototypes"):
        parse(["--loss", "neuclip", "--prototyp", "8"])
    assert parse(["--batch-s", "8"])[0].batch_size == 8  # as OpenCLIP does


def test_explicit_flags_win_over_the_recipe():
    args, loss = parse(["--recipe", "cc3m", "--loss", "neuclip", "--lr", "3e-4", "--rho", "7"])
    assert (args.model, args.lr, loss.options["rho"]) == ("RN50", 3e-4, 7.0)
    assert "prototypes" in loss.given


def test_a_recipe_combines_with_another_part():
    _, loss = parse(["--recipe", "cc3m", "--loss", "neuclip", "--normalizer", "mlp"])
    assert loss.options["normalizer"] == "mlp"
    assert "prototypes" not in loss.options


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--horovod"], "torchrun"),
        (["--trace", "--train-data", "x.tar"], "--trace is for evaluation only"),
        (["--distill-model", "RN50"], "distillation"),
        (["--lr-scheduler", "const-cooldown", "--epochs-cooldown", "50"], "50, more than --epochs 32"),
        (["--epochs-cooldown", "5"], "--epochs-cooldown needs --lr-scheduler const-cooldown"),
        (["--lr-scheduler", "const-cooldown"], "needs --lr-scheduler const-cooldown, and the other way round"),
        (["--lr-min", "1e-3"], "--lr-min is where --lr-scheduler cosine ends, at most at --lr"),
        (["--lr-min", "1e-5", "--lr-scheduler", "const"], "--lr-min is where --lr-scheduler cosine ends"),
        (["--lock-image-unlocked-groups", "1"], "--lock-image-unlocked-groups needs --lock-image"),
        (["--logs", "none", "--save-every-steps", "5"], "--save-every-steps needs a folder"),
        (["--eval-data-dir", "data"], "--eval-data-dir needs --eval-suite"),
        (["--rho", "3", "--hard-share", "0.5", "--loss", "fastclip"], "--rho and --hard-share say the same"),
        (["--dataset-type", "synthetic", "--val-data", "val.tar"], "reads no files, not those of --val-data val.tar"),
        (["--eval-suite", "quick"], "--eval-data-dir"),
        (["--train-data-upsampling-factors", "1::2"], "--dataset-resampled"),
        (["--fsdp-no-reshard-after-forward"], "needs --fsdp"),
        (["--fsdp", "--ddp-static-graph"], "--fsdp replaces"),
        (["--ddp-static-graph", "--accum-freq", "2"], "--ddp-static-graph and --accum-freq 2: PyTorch's static graph"),
        (["--image-backend", "torchvision"], "--image-backend needs --train-data"),
        (["--loss", "neuclip", "--views", "2"], "--views 2: neuclip compares images with texts; .* simclr, sogclr"),
        (["--loss", "sogclr", "--views", "2", "--rho", "5"], "--rho: not used by the loss 'sogclr with --views 2'"),
        (["--loss", "sogclr", "--projection-dim", "8"], "--projection-dim: not used by the loss 'sogclr'"),
        (["--recipe", "cc3m", "--loss", "sogclr", "--views", "2"], "is for images with texts, not for --views 2"),
        (["--recipe", "imagenet", "--loss", "sogclr", "--views", "1"], "is for images alone, not for --views 1"),
    ],
)
def test_wrong_command_lines_are_refused_with_the_reason(argv, message):
    with pytest.raises(UsageError, match=message):
        parse(argv)


def help_of(capsys, *argv):
    with pytest.raises(SystemExit) as stop:
        parse([*argv])
    assert stop.value.code == 0
    return capsys.readouterr().out


def test_the_help_has_every_flag_with_the_losses_defaults(capsys):
    short = help_of(capsys, "--help")
    assert set(flag_table.from_file().defaults) <= set(short.split())
    assert {"--local-loss", "--train-data", "--aug-cfg", "--save-every-steps", "--recipe"} <= set(short.split())
    assert len(short.splitlines()) < 90 and max(map(len, short.splitlines())) <= 125
    whole = " ".join(help_of(capsys, "--help-all").split())
    for part in ("(default: 4096 with neuclip, queueclip)", "--local-loss calculate loss w/ local", "--fsdp spread"):
        assert part in whole
    assert "main.py" not in whole and "--alpha-gradient" not in short + whole


def test_the_help_of_a_loss_describes_its_flags_only(capsys):
    for given in (["--loss", "neuclip"], ["--loss=neuclip"]):
        shown = help_of(capsys, "--help", *given)
        assert "--restart-every 500\n      steps between two restarts" in shown
        assert "--gamma" not in shown and "--train-data" not in shown
    assert "none" in help_of(capsys, "--loss", "siglip", "-h")
    assert "Flags that everybody needs" in help_of(capsys, "--help", "--loss", "unknown")


def test_the_help_knows_the_options_that_the_code_has():
    assert flag_table.from_file() == flag_table.of_training(), "run: python -m tests.losses.option_tables"


def test_every_option_of_a_loss_has_exactly_one_flag():
    actions = [
        action
        for action in build_parser(flag_table.of_training())._actions
        if action.dest in OPTIONS and HARD_SHARE.flag not in action.option_strings
    ]
    assert sorted(action.dest for action in actions) == sorted(
        name for name, option in OPTIONS.items() if not option.openclip_flag
    )
    assert all(action.option_strings[0] == OPTIONS[action.dest].flag for action in actions)


def test_every_field_of_a_configuration_names_a_flag_with_its_default():
    flags = vars(parse(["--train-data", "x"])[0])
    for config in (config for configs in FLAG_GROUPS.values() for config in configs):
        for field in flag_fields(config):
            assert python_name(field) in flags, f"{config.__name__}.{field.name}"


@pytest.mark.parametrize("joined", [True, False])
def test_an_option_of_the_loss_by_its_name(joined):
    words = ["prototypes=64", "restart_every=none", "normalizer-reset=false", "simultaneous=true"]
    flags = [part for word in words for part in ([f"--loss-option={word}"] if joined else ["--loss-option", word])]
    _, loss = parse(["--loss", "neuclip", "--train-data", "x.tar", *flags])
    wanted = {"prototypes": 64, "restart_every": None, "normalizer_reset": False, "simultaneous": True}
    assert wanted.items() <= loss.options.items()


def test_an_old_spelling_works_and_says_the_new_one(capsys):
    _, loss = parse(["--loss", "neuclip", "--no-alpha-gradient", "--loss-eps=1e-6"])
    assert (loss.options["alpha_gradient"], loss.options["eps"]) == (False, 1e-6)
    notes = capsys.readouterr().err.splitlines()
    assert [note.split(";")[0] for note in notes] == [
        "note: --loss-eps is spelled --loss-option eps=VALUE now",
        "note: --alpha-gradient is spelled --loss-option alpha_gradient=VALUE now",
    ]
    parse(["--recipe", "cc3m", "--loss", "neuclip", "--loss-option", "eps=1e-6"])
    assert not capsys.readouterr().err


def test_messages_name_the_spelling_of_today():
    with pytest.raises(UsageError, match="--loss-option leave_own_out: not used by the loss 'neuclip'"):
        parse(["--loss", "neuclip", "--loss-option", "leave_own_out=true"])
    with pytest.raises(UsageError, match="argument --loss-option: eps='-1': expected a number >= 0"):
        parse(["--loss", "neuclip", "--loss-option", "eps=-1"])


def test_the_names_of_openclips_main_branch_work():
    args, _ = parse(["--train-data", "x.tar", "--json-text-key", "long;short", "--visual-layer-decay=0.7"])
    assert (args.caption_key, args.image_layer_decay) == ("json:long;json:short", 0.7)
    assert parse(["--text-key", "txt;caption"])[0].caption_key == "txt;caption"
