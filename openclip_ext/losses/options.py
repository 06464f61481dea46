"""The options that several methods share. A method's own options are in its file; the registry collects all of them.

The command line's flags, the tables in the documentation and the checks of :func:`openclip_ext.create_loss` are made from
the options. A part uses the options that are keyword-only arguments of its constructor.
"""

import math
import re
from dataclasses import dataclass
from typing import Any


class OptionError(ValueError):
    """An option that a loss does not take, or not with this value.

    The message writes options as Python does (``gamma=0.5``); :meth:`with_flags` writes them as a command line does.

    Attributes:
        option: name of the (first) option that is wrong.
    """

    def __init__(self, option: str, message: str) -> None:
        super().__init__(message)
        self.option = option

    def with_flags(self) -> str:
        """Return the message for a command line: with ``--gamma 0.5`` for ``gamma=0.5``."""
        return _ASSIGNMENT.sub(_as_flag, str(self))


_ASSIGNMENT = re.compile(r"\b([a-z]\w*)=([^\s:,;)]*)")


def _as_flag(assignment: re.Match[str]) -> str:
    flag, value = flag_of(assignment[1]), assignment[2]
    if value.startswith("'"):
        value = value.strip("'")
    if value in ("True", "False"):
        return flag if value == "True" else flag.replace("--", "--no-", 1)
    return f"{flag} {value}".rstrip()


@dataclass(frozen=True)
class Option:
    """One option of a loss.

    Attributes:
        name: the keyword of ``create_loss``.
        type: what a value is parsed as (``bool`` options become ``--name`` / ``--no-name``).
        default: the value unless the loss or its parts have a default of their own.
        help: its effect, for ``--help`` and the documentation.
        symbol: the papers' symbol.
        choices: the accepted values, or None for any.
        minimum, maximum: the accepted range, both ends included.
        exclusive_minimum, exclusive_maximum: an open lower or upper end.
        flag: the command-line flag, unless it is the name with hyphens.
        nullable: None ("none" on the command line) is a value; ``help`` says what it means.
        openclip_flag: OpenCLIP's command line has this flag already.
        cure: what to do instead of giving a value that is refused.
    """

    name: str
    type: type
    default: Any
    help: str
    symbol: str = ""
    choices: tuple[str, ...] | None = None
    minimum: float | None = None
    maximum: float | None = None
    exclusive_minimum: float | None = None
    exclusive_maximum: float | None = None
    flag: str = ""
    nullable: bool = False
    openclip_flag: bool = False
    cure: str = ""

    def __post_init__(self) -> None:
        if not self.flag:
            object.__setattr__(self, "flag", _default_flag(self.name))

    def check(self, value: Any) -> Any:
        """Return ``value`` as the option's type.

        Raises:
            OptionError: it is not a value of this option; the message says what was found and what is accepted.
        """
        if value is None:
            if self.nullable:
                return None
            raise OptionError(self.name, f"{self.name}=None: expected {self.accepted()}")
        converted = self._convert(value)
        if self.choices is not None and converted not in self.choices:
            raise OptionError(self.name, f"{self.name}={value!r}: expected one of {', '.join(self.choices)}")
        if self._out_of_range(converted):
            raise OptionError(self.name, f"{self.name}={value!r}: expected {self.accepted()}")
        return converted

    def parse(self, text: str) -> Any:
        """Convert a command line's text; ``none`` is None for a nullable option.

        Raises:
            OptionError: as :meth:`check`.
        """
        if self.nullable and text.lower() == "none":
            return None
        return self.check(text)

    def _convert(self, value: Any) -> Any:
        wrong = OptionError(self.name, f"{self.name}={value!r}: expected {self.accepted()}")
        if isinstance(value, bool) is not (self.type is bool):
            raise wrong
        if self.type is int and isinstance(value, float) and not value.is_integer():
            raise wrong
        try:
            return self.type(value)
        except (TypeError, ValueError):
            raise wrong from None

    def _out_of_range(self, value: Any) -> bool:
        if self.type not in (int, float):
            return False
        inside = math.isfinite(value)
        if self.minimum is not None:
            inside = inside and value >= self.minimum
        if self.exclusive_minimum is not None:
            inside = inside and value > self.exclusive_minimum
        if self.maximum is not None:
            inside = inside and value <= self.maximum
        if self.exclusive_maximum is not None:
            inside = inside and value < self.exclusive_maximum
        return not inside

    def accepted(self) -> str:
        """The accepted values in words."""
        text = _TYPE_NAMES[self.type]
        if self.minimum is not None:
            text += f" >= {self.minimum:g}"
        if self.exclusive_minimum is not None:
            text += f" > {self.exclusive_minimum:g}"
        if self.maximum is not None:
            text += f", at most {self.maximum:g}"
        if self.exclusive_maximum is not None:
            text += f", below {self.exclusive_maximum:g}"
        if self.cure:
            text += f"; {self.cure}"
        return text


def _default_flag(name: str) -> str:
    return "--" + name.replace("_", "-")


_TYPE_NAMES = {int: "an integer", float: "a number", bool: "True or False", str: "a string"}


SHARED_OPTIONS = (
    # What is contrasted.
    Option(
        "views",
        int,
        1,
        "1: contrast images with texts; 2: contrast two augmented views of each image, without texts",
        minimum=1,
        maximum=2,
    ),
    Option(
        "equal_captions",
        str,
        "negative",
        "what other samples with an anchor's caption are to it: negatives, as in OpenCLIP; left out (mask); or more positives",
        choices=("negative", "mask", "positive"),
    ),
    # The objective.
    Option(
        "eps",
        float,
        1e-14,
        "small constant inside the logarithm of the objective (FastCLIP: 1e-14; 1e-6 on LAION-400M)",
        symbol="ε",
        minimum=0.0,
        flag="--loss-eps",
    ),
    # Temperatures.
    Option("rho", float, 6.5, "weight of the temperature regularizer; larger means a smaller temperature", symbol="ρ"),
    Option(
        "rho_end",
        float,
        None,
        "value of rho in the last part of the run (see --rho-switch); none: rho stays",
        symbol="ρ annealing",
        nullable=True,
    ),
    Option(
        "rho_switch",
        float,
        0.75,
        "fraction of the epochs after which rho becomes rho_end",
        symbol="ρ annealing",
        minimum=0.0,
        maximum=1.0,
    ),
    Option(
        "temperature",
        float,
        None,
        "start value of the temperature, or its value if constant; none: the model's (OpenCLIP: 0.07)",
        symbol="τ",
        exclusive_minimum=0.0,
        nullable=True,
    ),
    Option("temperature_min", float, 0.01, "lower bound of learned temperatures", symbol="τ_0", exclusive_minimum=0.0),
    Option("temperature_max", float, 1.0, "upper bound of learned temperatures", exclusive_minimum=0.0),
    Option(
        "lr_tau",
        float,
        None,
        "learning rate of the temperature (constant); none: the encoders' learning rate, with its schedule",
        minimum=0.0,
        nullable=True,
    ),
    Option(
        "temperature_queue",
        int,
        4096,
        "recent embeddings that a solved temperature is solved over",
        symbol="m",
        minimum=2,
    ),
    Option("solve_per_sample", bool, False, "solve for each anchor's own temperature, in every step"),
    # Schedules.
    Option(
        "epochs",
        int,
        32,
        "length of the run, for schedules that span it",
        symbol="T",
        minimum=1,
        openclip_flag=True,
    ),
    # State of each sample.
    Option(
        "state_device",
        str,
        "auto",
        "placement of per-sample state; auto: the model's device up to 1 GiB a table and rank, else host memory",
        choices=("auto", "model", "cpu"),
    ),
    Option(
        "state_dir",
        str,
        None,
        "keep per-sample state in a memory-mapped file in this folder (fast and local, no network); none: in memory",
        nullable=True,
    ),
    # Estimates from embeddings.
    Option("prototypes", int, 4096, "number of prototypes", symbol="m", minimum=1),
    Option(
        "normalizer_updates",
        int,
        10,
        "updates of the normalizer network per step",
        symbol="T_u (NeuCLIP), T_λ (AmorLIP)",
        minimum=0,
    ),
    Option("normalizer_lr", float, 1.0, "learning rate of the normalizer network", minimum=0.0),
    Option(
        "normalizer_objective",
        str,
        "unified",
        "what the normalizer network minimizes",
        choices=("unified", "l2-log", "kl", "js", "kl-printed"),
    ),
    Option(
        "alpha_gradient",
        bool,
        False,
        "let the gradient of the predicted log-normalizers reach the encoders (NeuCLIP's equation 12, read literally)",
    ),
    # Networks of a loss's own.
    Option(
        "projection_dim",
        int,
        None,
        "width of the loss's projection of the embeddings; none: the embeddings' width",
        minimum=1,
        nullable=True,
    ),
    Option("seed", int, 0, "seed of the loss's own networks", openclip_flag=True),
)

# Another way to say ρ.
HARD_SHARE = Option(
    "hard_share",
    float,
    None,
    "rho as the share of the data that counts as hard: sets rho to -log of it",
    symbol="exp(−ρ)",
    exclusive_minimum=0.0,
    maximum=1.0,
)


def rho_of(hard_share: float) -> float:
    """ρ of :data:`HARD_SHARE`."""
    return -math.log(hard_share)


# Placement of state: a property of the machine, not of the method.
PLACEMENT_OPTIONS = ("state_device", "state_dir")


def flag_of(name: str) -> str:
    """The command-line flag of an option, by its name alone: recipes are listed without importing the losses."""
    return _FLAGS.get(name, _default_flag(name))


_FLAGS = {option.name: option.flag for option in SHARED_OPTIONS}
