"""Parse the training command line, with OpenCLIP's flags and ours, and print its help. Only a loss's help imports torch.

Our flags come from the fields of the configurations (``openclip_ext/cli/options.py``) and from the options of the losses.
``--help`` is short, ``--loss NAME --help`` describes the flags of one loss, and ``--help-all`` describes all flags.
"""

import argparse
import contextlib
import math
import textwrap
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NoReturn

from openclip_ext import compat
from openclip_ext.cli.errors import UsageError
from openclip_ext.cli.options import Option, OptionError, nearest, option_as_words, own_options
from openclip_ext.losses.options import HARD_SHARE, OPTIONS, SUMMARIES, rho_of
from openclip_ext.training import recipes
from openclip_ext.training.config import FLAG_GROUPS
from openclip_ext.training.recipes import configurations

_WIDTH = 100
_USAGE = "openclip-ext train --loss NAME --train-data SHARDS --model NAME [FLAG ...]"
_EXAMPLE = """\
  openclip-ext train --loss queueclip --train-data 'shards/{00000..00331}.tar' --model ViT-B-32 \\
      --batch-size 128 --epochs 32 --lr 5e-4 --warmup 2000 --name first"""
_EVERYDAY = {
    "--loss NAME": "name of the loss, from the list below (default: openclip)",
    "--train-data SHARDS": "tar files, such as 'data/{00000..00331}.tar', a table, or class folders",
    "--model NAME": "OpenCLIP's model name (default: RN50)",
    "--batch-size N": "samples per GPU in a micro-batch (default: 64)",
    "--epochs N": "number of epochs (default: 32)",
    "--lr RATE": "peak learning rate, after the warm-up (default: 5e-4)",
    "--warmup STEPS": "number of steps in which the learning rate rises, or their share, such as 0.1 (default: 10000)",
    "--config finetune": "settings to fine-tune a pretrained model, which follow the number of pairs",
    "--precision KIND": "amp, amp_bf16, or fp32 on a CPU (default: amp)",
    "--name NAME": "name of the run, which writes to LOGS/NAME (--logs LOGS, default: ./logs)",
    "--resume latest": "continue from the newest checkpoint of the run with this name",
}
_NOT_SUPPORTED = ("--horovod", "--distill-model", "--distill-pretrained", "--use-bnb-linear")
# Help of OpenCLIP's flags that do more or less here than OpenCLIP's help says.
_OPENCLIP_HELP = {
    "--train-num-samples": "samples per epoch (default: all samples)",
    "--val-num-samples": "no effect: all validation samples are used",
    "--warmup": "number of steps in which the learning rate rises, or below 1, their share of the run",
    "--cache-dir": "folder for downloaded models, and for copies of remote shards",
    **dict.fromkeys(_NOT_SUPPORTED, "not supported"),
}
_MORE = (
    "openclip-ext losses NAME describes a loss. --loss NAME --help lists the loss's flags, --help-all lists all flags."
)


class Parser(argparse.ArgumentParser):
    """A parser that raises UsageError for a wrong command line. ``flags`` lists all flags that were added outside a group."""

    def __init__(self, *args: Any, **options: Any) -> None:
        self.flags: list[str] = []
        super().__init__(*args, **options)

    def add_argument(self, *names: Any, **options: Any) -> argparse.Action:
        """Add an argument, and record its flags."""
        self.flags += [name for name in names if name.startswith("--")]
        if "--warmup" in names:
            options["type"] = _steps_or_share
        options |= {"help": _OPENCLIP_HELP.get(names[0], options.get("help"))}
        return super().add_argument(*names, **options)

    def error(self, message: str) -> NoReturn:
        """Raise UsageError, because argparse would print a long usage text before the message."""
        raise UsageError(message)


def _steps_or_share(text: str) -> float:
    """Parse a number of steps, or a share of the run's steps."""
    with contextlib.suppress(ValueError):
        value = float(text)
        if 0 <= value < 1 or value == math.floor(value):
            return value if 0 < value < 1 else int(value)
    raise argparse.ArgumentTypeError(f"{text}: expected a number of steps, or a share of the run below 1, such as 0.1")


def build_parser() -> Parser:
    """Return the parser of all flags: first OpenCLIP's flags (:attr:`Parser.flags`), then ours, in groups."""
    parser = compat.openclip_parser(Parser)
    parser.prog = "openclip-ext train"
    # None means that the user gave no such flag. OpenCLIP's own values would look like the user's.
    parser.set_defaults(device=None, csv_img_key=None, csv_caption_key=None)
    add_loss_flags(parser.add_argument_group("loss"))
    for title, options in run_options().items():
        group = parser.add_argument_group(title)
        for option in options:
            if option.flag not in parser.flags:  # OpenCLIP already has the flag --cache-dir
                add_flag(group, option, default=option.default)
    group.add_argument(
        "--recipe",
        metavar="NAME",
        help=f"settings of the loss's paper for a data set ({', '.join(recipes.names())}); your flags override them",
    )
    group.add_argument(
        "--config",
        metavar="NAME",
        help=f"settings for a task ({', '.join(configurations.NAMES)}), which follow the number of pairs, or the config.json "
        "of a run, to repeat it; your flags override them",
    )
    return parser


def run_options() -> dict[str, list[Option]]:
    """Return the options of a run that are not OpenCLIP's flags, by their headings in the help."""
    return {title: own_options(configs) for title, configs in FLAG_GROUPS.items()}


def own_flags() -> list[str]:
    """Return all flags that OpenCLIP does not have, without their ``--no-`` forms."""
    of_run = [option.flag for options in run_options().values() for option in options]
    return ["--loss", "--recipe", "--config", "--loss-option", *_loss_flags(), *of_run]


def _own_loss_options() -> list[Option]:
    return [option for option in OPTIONS.values() if not option.openclip_flag]


def _loss_flags() -> list[str]:
    return [HARD_SHARE.flag, *(option.flag for option in _own_loss_options() if not option.ablation)]


def add_loss_flags(group: argparse._ArgumentGroup, hidden: Collection[str] = ()) -> None:
    """Add ``--loss`` and the options of all losses. ``hidden`` options are parsed, but are not in the help.

    The parsed arguments have no attribute for an option that was not given, because None is a valid value.
    """
    names = f"one of: {', '.join(SUMMARIES)}, or my.module:METHOD (default: openclip)"
    group.add_argument("--loss", default=None, help=argparse.SUPPRESS if "loss" in hidden else names)
    group.add_argument(
        "--loss-option",
        metavar="NAME=VALUE",
        action="append",
        type=_parse_assignment,
        default=argparse.SUPPRESS,
        help="sets an option of the loss by its name; openclip-ext losses LOSS lists the names",
    )
    rho_flags = group.add_mutually_exclusive_group()
    for option in _own_loss_options():
        if not option.ablation:
            more = {"help": argparse.SUPPRESS} if option.name in hidden else {}
            add_flag(rho_flags if option.name == "rho" else group, option, default=argparse.SUPPRESS, **more)

    def rho_of_share(text: str) -> float:
        return rho_of(_parser_of(HARD_SHARE)(text))

    more = {"help": argparse.SUPPRESS} if "rho" in hidden else {}
    add_flag(rho_flags, HARD_SHARE, default=argparse.SUPPRESS, dest="rho", type=rho_of_share, **more)


def take_loss_options(arguments: dict[str, Any]) -> dict[str, Any]:
    """Remove the options of losses from the parsed arguments. Return the given options by name.

    Raise UsageError for an option that was given in two ways.
    """
    by_flag = {
        option.name: arguments.pop(_dest(option)) for option in _own_loss_options() if _dest(option) in arguments
    }
    by_name = dict(arguments.pop("loss_option", ()))
    for name in by_flag.keys() & by_name.keys():
        raise UsageError(f"{OPTIONS[name].flag} and --loss-option {name} set the same option: give one of them")
    return by_flag | by_name


def _dest(option: Option) -> str:
    """Return an option's attribute name in the parsed arguments. It comes from the flag, because ``eps`` is Adam's ε there."""
    return option.flag.removeprefix("--").replace("-", "_")


def _parse_assignment(text: str) -> tuple[str, Any]:
    """Parse ``NAME=VALUE`` of ``--loss-option``. If the option also has a flag, both are equivalent."""
    name, _, value = text.partition("=")
    options = {option.name: option for option in _own_loss_options()}
    option = options.get(name.replace("-", "_"))
    if option is None or not value:
        wrong = f"no option {name!r}{nearest(name, options)}" if option is None else "expected NAME=VALUE"
        raise argparse.ArgumentTypeError(f"{text}: {wrong}; openclip-ext losses LOSS lists the names")
    try:
        return option.name, option.parse(value)
    except OptionError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def add_flag(group: argparse._ActionsContainer, option: Option, default: Any, **more: Any) -> None:
    """Add an option's flag to a parser or a group. ``more`` overrides arguments of ``add_argument``."""
    text = option.help + (f" [{option.symbol}]" if option.symbol else "")
    settings: dict[str, Any]
    if option.type is bool:
        # A flag that is off by default does not need a --no- form.
        settings = {"action": "store_true" if default is False else argparse.BooleanOptionalAction}
    else:
        if default not in (None, (), argparse.SUPPRESS):
            text += f" (default: {default})"
        metavar = "{" + ",".join(option.choices) + "}" if option.choices else option.type.__name__.upper()
        settings = {"type": _parser_of(option), "metavar": metavar}
    if option.is_list:
        settings["nargs"] = "*"
    try:
        group.add_argument(option.flag, **{"default": default, "help": text.replace("%", "%%"), **settings, **more})
    except argparse.ArgumentError as error:
        # Only the options of a loss outside of this package can have a name that is taken.
        raise UsageError(f"an option of your loss has the name of another flag, {option.flag}: rename it") from error


def _parser_of(option: Option) -> Callable[[str], Any]:
    def parse_value(text: str) -> Any:
        try:
            return option.parse(text)
        except ValueError as error:
            # argparse puts the flag before the message, so remove the option's name from the message.
            raise argparse.ArgumentTypeError(str(error).removeprefix(f"{option.name}=")) from error

    return parse_value


def print_help(argv: list[str]) -> bool:
    """If a command line requests help, print the help and return True. Else return False."""
    loss = chosen(argv, "--loss")
    if "--help-all" in argv:
        parser = build_parser()
        parser.usage = _USAGE
        parser.print_help()
    elif not {"-h", "--help"} & {*argv}:
        return False
    elif loss in SUMMARIES or ":" in (loss or ""):
        print(f"The flags of --loss {loss}, with their defaults:\n\n{describe_options(str(loss))}\n\n{_MORE}")
    else:
        print(_short())
    return True


def import_losses(argv: list[str], flag: str = "--loss") -> None:
    """Import the modules of your own losses in the value of ``flag``, because their options are flags."""
    from openclip_ext.losses import registry  # imported late, because it imports torch

    for name in filter(None, (chosen(argv, flag) or "").split(",")):
        registry.find_method(name.strip())


def chosen(argv: Sequence[str], flag: str) -> str | None:
    """Return the value of one flag, without parsing other flags. None if it is not given."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument(flag, dest="value", nargs="?")
    return parser.parse_known_args([*argv])[0].value


def _short() -> str:
    """Return the short help: an example, the common flags, one line per loss, and the names of all other flags."""
    losses = {loss: summary.partition(". ")[0].rstrip(".") for loss, summary in SUMMARIES.items()}
    of_losses = ["--loss-option NAME=VALUE", "--recipe", "--config", *_loss_flags()]
    of_run = {title: [option.flag for option in options] for title, options in run_options().items()}
    without = {*_NOT_SUPPORTED, "--val-num-samples", *of_run["data"]}
    of_openclip = [flag for flag in build_parser().flags if flag not in without]
    parts = [
        f"usage: {_USAGE}",
        _EXAMPLE,
        f"Common flags:\n{_in_columns(_EVERYDAY)}",
        f"Losses:\n{_in_columns(losses)}",
        f"More flags, for the loss:\n{_wrapped(of_losses)}",
        *(f"For {title}:\n{_wrapped(flags)}" for title, flags in of_run.items()),
        f"Flags of OpenCLIP, with the same meaning:\n{_wrapped(of_openclip)}",
        _MORE,
    ]
    return "\n\n".join(parts)


def _in_columns(rows: Mapping[str, str]) -> str:
    width = max(map(len, rows))
    return "\n".join(f"  {name:{width}}  {meaning}" for name, meaning in rows.items())


def describe_options(loss: str) -> str:
    """Return a help text for the loss's options, except OpenCLIP's flags. Each option is shown as a flag with its default."""
    from openclip_ext.losses import registry  # imported late, because it imports torch

    defaults = registry.run_defaults(registry.find_method(loss).name, {})
    lines = []
    for option in sorted(OPTIONS.values(), key=lambda option: option.ablation):
        if option.name not in defaults or option.openclip_flag:
            continue
        meaning = option.help + (f" [{option.symbol}]" if option.symbol else "")
        meaning += f"; one of {', '.join(option.choices)}" if option.choices else ""
        lines.append("  " + option_as_words(option, defaults[option.name])[0].replace("=", " ", 1))
        lines += textwrap.wrap(meaning, _WIDTH, initial_indent=" " * 6, subsequent_indent=" " * 6)
    return "\n".join(lines) or "  none"


def _wrapped(words: Iterable[str]) -> str:
    """Wrap flags into lines. A line break never separates a flag from its value."""
    text = " ".join(word.replace(" ", "\0") for word in words)
    lines = textwrap.wrap(text, _WIDTH, initial_indent="  ", subsequent_indent="  ", break_on_hyphens=False)
    return "\n".join(lines).replace("\0", " ") or "  none"
