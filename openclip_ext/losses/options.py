"""Every option of every loss, in one table.

The command line's flags, the documentation and the checks of :func:`openclip_ext.create_loss` are all made from it, and
which part of a loss uses which option is read off the parts' constructors. Nothing heavy is imported here: ``--help``
must be quick.
"""

from dataclasses import dataclass
from typing import Any

NORMALIZER_NAMES = ("minibatch", "moving-average", "mlp", "prototypes", "queue")
TEMPERATURE_SCHEME_NAMES = ("constant", "global", "per-sample", "predicted")


@dataclass(frozen=True)
class Option:
    """One option of a loss.

    Attributes:
        name: the keyword of ``create_loss``.
        type: what a value is parsed as (``bool`` options become ``--name`` / ``--no-name``).
        default: the value where neither the loss nor its parts have one of their own.
        help: what it does, for ``--help`` and the documentation.
        symbol: the papers' symbol.
        choices: the accepted values, if they are few.
        minimum, maximum: the accepted range, both ends included.
        exclusive_minimum: an open lower end.
        flag: the command-line flag, where it is not the name with hyphens.
        nullable: None ("none" on the command line) is a value; ``help`` says what it means.
        openclip_flag: OpenCLIP's command line has this flag already.
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
    flag: str = ""
    nullable: bool = False
    openclip_flag: bool = False

    def __post_init__(self) -> None:
        if not self.flag:
            object.__setattr__(self, "flag", "--" + self.name.replace("_", "-"))

    def check(self, value: Any) -> Any:
        """Return ``value`` as the option's type.

        Raises:
            ValueError: if it is no such value, saying what was found and what is accepted.
        """
        if value is None:
            if self.nullable:
                return None
            raise ValueError(f"{self.name}=None: expected {self.accepted()}")
        converted = self._convert(value)
        if self.choices is not None and converted not in self.choices:
            raise ValueError(f"{self.name}={value!r}: expected one of {', '.join(self.choices)}")
        if self._out_of_range(converted):
            raise ValueError(f"{self.name}={value!r}: expected {self.accepted()}")
        return converted

    def parse(self, text: str) -> Any:
        """The value a command line's text stands for; ``none`` is None where the option has it.

        Raises:
            ValueError: as :meth:`check` does.
        """
        if self.nullable and text.lower() == "none":
            return None
        return self.check(text)

    def _convert(self, value: Any) -> Any:
        wrong = ValueError(f"{self.name}={value!r}: expected {self.accepted()}")
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
        inside = value == value  # not a number is never inside
        if self.minimum is not None:
            inside = inside and value >= self.minimum
        if self.exclusive_minimum is not None:
            inside = inside and value > self.exclusive_minimum
        if self.maximum is not None:
            inside = inside and value <= self.maximum
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
        return text


_TYPE_NAMES = {int: "an integer", float: "a number", bool: "True or False", str: "a string"}

_ALL = (
    # What the loss is made of.
    Option(
        "normalizer",
        str,
        None,
        "how the log-normalizers are estimated (default: as the loss says)",
        choices=NORMALIZER_NAMES,
        nullable=True,
    ),
    Option(
        "temperature_scheme",
        str,
        None,
        "what happens to the temperature (default: as the loss says)",
        choices=TEMPERATURE_SCHEME_NAMES,
        nullable=True,
    ),
    Option(
        "views",
        int,
        1,
        "what is contrasted; 1: images with texts, 2: two augmented views of each image, without texts",
        minimum=1,
        maximum=2,
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
    Option("rho", float, 6.5, "weight of the temperature regulariser; larger means a smaller temperature", symbol="ρ"),
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
        "the temperature to start from, or to keep where it is constant; none: the model's (OpenCLIP: 0.07)",
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
        "learning rate of the temperature (constant); none: that of the encoders, with its schedule",
        minimum=0.0,
        nullable=True,
    ),
    # Moving average.
    Option(
        "gamma",
        float,
        0.2,
        "weight of the new estimate in the moving average",
        symbol="γ_min",
        minimum=0.0,
        maximum=1.0,
    ),
    Option(
        "gamma_schedule",
        str,
        "cosine",
        "constant, or from 1 down to gamma over the first gamma_decay_epochs",
        choices=("constant", "cosine"),
    ),
    Option(
        "gamma_decay_epochs",
        int,
        None,
        "epochs in which gamma falls to its final value; none: half of the epochs",
        symbol="E",
        minimum=1,
        nullable=True,
    ),
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
        "where state of each sample lies; auto: with the model while a rank's part of a table is at most 1 GiB, else in the "
        "host's memory",
        choices=("auto", "model", "cpu"),
    ),
    Option(
        "state_dir",
        str,
        None,
        "folder (fast, local, not a network's) for a memory-mapped file that holds the state of each sample; none: in memory",
        nullable=True,
    ),
    # Networks that predict the normalizers.
    Option("prototypes", int, 4096, "number of prototypes", symbol="m", minimum=1),
    Option(
        "restart_every",
        int,
        500,
        "steps between two restarts of the prototypes; none: never",
        symbol="T_r",
        minimum=1,
        nullable=True,
    ),
    Option(
        "normalizer_updates",
        int,
        10,
        "updates of the normalizer network on one batch",
        symbol="T_u (NeuCLIP), T_λ (AmorLIP)",
        minimum=0,
    ),
    Option("normalizer_lr", float, 1.0, "learning rate of the normalizer network", minimum=0.0),
    Option(
        "normalizer_objective",
        str,
        "unified",
        "what the normalizer network minimises",
        choices=("unified", "l2-log", "kl", "js", "kl-printed"),
    ),
    Option("normalizer_reset", bool, True, "empty AdaGrad's accumulators when the prototypes restart"),
    Option(
        "alpha_gradient",
        bool,
        False,
        "let the gradient of the predicted log-normalizers reach the encoders, as NeuCLIP's (12) reads literally",
    ),
    Option("simultaneous", bool, False, "predict with the network as it was before this step's updates (Algorithm 3)"),
    Option(
        "batch_weight",
        float,
        0.5,
        "share of the current batch in the normalizer of the queue; bounds the weights by its inverse",
        symbol="λ",
        minimum=0.0,
        maximum=1.0,
    ),
    Option(
        "leave_own_out",
        bool,
        False,
        "leave an anchor's own pair out of the queue: a smaller error, and weights without the bound that it gives them",
    ),
    Option(
        "width_factor", float, 0.5, "hidden width of the MLP over the embedding's", symbol="f_d", exclusive_minimum=0.0
    ),
    Option("fit_every", int, 1, "steps between two fits of the MLP", symbol="T_online", minimum=1),
    Option("target_every", int, 1, "steps between two updates of the target network", symbol="T_target", minimum=1),
    Option("ema_decay", float, 0.0, "decay of the target network", symbol="α", minimum=0.0, maximum=1.0),
    Option(
        "previous_weight",
        float,
        0.0,
        "final weight of the previous epoch's target network in the MLP's target",
        symbol="β_T",
        minimum=0.0,
        maximum=1.0,
    ),
    Option("reinitialize", bool, False, "re-initialise the MLP at every epoch's start (Algorithm 1, line 4)"),
    Option("negatives_only", bool, False, "leave the positive pair out of the partition function the MLP fits"),
    Option(
        "gather_stage2",
        bool,
        False,
        "AmorLIP's second stage on the global batch instead of each process's own",
    ),
    # Projections of a loss's own.
    Option(
        "projection_dim",
        int,
        None,
        "width of the space into which a loss projects the embeddings; none: as wide as they are",
        minimum=1,
        nullable=True,
    ),
    Option("seed", int, 0, "start of the loss's own networks", openclip_flag=True),
    # OpenCLIP's own losses.
    Option("local_loss", bool, False, "rows of this process only", openclip_flag=True),
    Option("gather_with_grad", bool, False, "gather the features with gradient", openclip_flag=True),
    Option(
        "loss_dist_impl",
        str,
        None,
        "how SigLIP's features travel between processes",
        choices=("bidir", "shift", "reduce", "gather"),
        openclip_flag=True,
        nullable=True,
    ),
    Option("coca_caption_loss_weight", float, 2.0, "weight of CoCa's caption loss", openclip_flag=True),
    Option("coca_contrastive_loss_weight", float, 1.0, "weight of CoCa's contrastive loss", openclip_flag=True),
)

# Where state lies: of the machine, not of the method.
PLACEMENT_OPTIONS = ("state_device", "state_dir")

OPTIONS: dict[str, Option] = {option.name: option for option in _ALL}
