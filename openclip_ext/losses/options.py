"""The options that several methods share. A method's own options are in its file; the registry collects all of them.

The command line's flags, the tables in the documentation and the checks of :func:`openclip_ext.create_loss` are made from
the options. A part uses the options that are keyword-only arguments of its constructor.
"""

import math

from openclip_ext.options import Option, OptionError, flag_of

__all__ = ["HARD_SHARE", "PLACEMENT_OPTIONS", "SHARED_OPTIONS", "Option", "OptionError", "flag_of", "rho_of"]


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
