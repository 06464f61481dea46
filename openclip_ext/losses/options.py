"""The names and options of this package's losses, without importing torch.

They define the flags, the tables in the documentation and the checks of :func:`openclip_ext.create_loss`. The options of a
part are the keyword-only arguments of its constructor.
"""

import functools
import math
import os
from collections.abc import Collection

from openclip_ext.cli.options import Option, OptionError, nearest
from openclip_ext.cli.words import LOSSES

# Options that only ablations set.
_ablation = functools.partial(Option, ablation=True)

# The options that choose parts of a loss.
PARTS = ("normalizer", "temperature_scheme")

# Options that need a reference model.
REFERENCE_OPTIONS = frozenset({"steer", "distill", "reference_temperature"})

# All options, in the order of the help texts: parts, samples, the objective, temperatures, schedules, estimates from
# embeddings, networks of a loss, and then the options of single methods.
PACKAGE_OPTIONS = (
    Option(
        "normalizer",
        str,
        None,
        "estimator of the log-normalizers (default: the loss's own)",
        choices=("minibatch", "mlp", "moving-average", "prototypes", "queue", "scent"),
        nullable=True,
    ),
    Option(
        "temperature_scheme",
        str,
        None,
        "source of the temperature (default: the loss's own)",
        choices=("constant", "global", "solved", "per-sample", "predicted"),
        nullable=True,
    ),
    Option(
        "views",
        int,
        1,
        "1: compare images with texts; 2: compare two augmented views of each image, without texts",
        minimum=1,
        maximum=2,
    ),
    Option(
        "equal_captions",
        str,
        "negative",
        "role of other samples with the anchor's caption or image: negatives (as in OpenCLIP), excluded (mask), or positives",
        choices=("negative", "mask", "positive"),
    ),
    Option(
        "steer",
        bool,
        True,
        "with a reference model: give a larger weight to negatives on which the model is worse than the reference",
    ),
    Option(
        "distill",
        float,
        0.0,
        "with a reference model: weight of the cross entropy between the two models' softmax distributions over the batch",
        minimum=0.0,
    ),
    Option(
        "reference_temperature",
        float,
        0.01,
        "temperature of the reference model's softmax, for --distill; the training program's default is the reference "
        "model's own temperature",
        exclusive_minimum=0.0,
    ),
    Option(
        "eps",
        float,
        1e-14,
        "small constant inside the logarithm of the objective (FastCLIP: 1e-14; 1e-6 on LAION-400M)",
        symbol="ε",
        minimum=0.0,
        flag="--loss-eps",
    ),
    Option("rho", float, 6.5, "weight of the temperature regularizer; a larger rho lowers the temperature", symbol="ρ"),
    Option(
        "rho_end",
        float,
        None,
        "value of rho in the last part of the run (see --rho-switch); none: rho is constant",
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
        "initial temperature, or the value of a constant temperature; none: the model's temperature (OpenCLIP: 0.07)",
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
        "constant learning rate of the temperature; none: the encoders' learning rate, with its schedule",
        minimum=0.0,
        nullable=True,
    ),
    Option(
        "temperature_queue",
        int,
        4096,
        "number of recent embeddings from which a solved temperature is computed",
        symbol="m",
        minimum=2,
    ),
    Option("epochs", int, 32, "number of epochs of the run, for schedules", symbol="T", minimum=1, openclip_flag=True),
    Option("prototypes", int, 4096, "number of prototypes (queueclip: queue length)", symbol="m", minimum=1),
    Option(
        "normalizer_updates",
        int,
        10,
        "updates of the normalizer network per step",
        symbol="T_u (NeuCLIP), T_λ (AmorLIP)",
        minimum=0,
    ),
    Option("normalizer_lr", float, 1.0, "learning rate of the normalizer network", minimum=0.0),
    _ablation(
        "normalizer_objective",
        str,
        "unified",
        "objective that the normalizer network minimizes",
        choices=("unified", "l2-log", "kl", "js", "kl-printed"),
    ),
    _ablation("l2_log_weight", float, 0.1, "weight of the l2-log term in kl, js and kl-printed", minimum=0.0),
    _ablation(
        "alpha_gradient",
        bool,
        False,
        "pass the gradient of the predicted log-normalizers to the encoders (NeuCLIP's equation 12)",
    ),
    _ablation(
        "alpha_tau_gradient",
        bool,
        False,
        "with alpha_gradient: also pass the gradient to a learned temperature (NeuCLIP's Algorithm 1, line 11)",
    ),
    Option(
        "projection_dim",
        int,
        None,
        "dimension of the loss's projection of the embeddings; none: the embedding dimension",
        minimum=1,
        nullable=True,
    ),
    Option("seed", int, 0, "seed of the loss's own networks", openclip_flag=True),
    _ablation(
        "width_factor",
        float,
        0.5,
        "hidden width of the MLP divided by the embedding dimension",
        symbol="f_d",
        exclusive_minimum=0.0,
    ),
    Option("fit_every", int, 1, "steps between two fits of the MLP", symbol="T_online", minimum=1),
    _ablation("target_every", int, 1, "steps between two updates of the target network", symbol="T_target", minimum=1),
    _ablation("ema_decay", float, 0.0, "decay of the target network's average", symbol="α", minimum=0.0, maximum=1.0),
    _ablation(
        "previous_weight",
        float,
        0.0,
        "final weight of the previous epoch's target network in the MLP's target",
        symbol="β_T",
        minimum=0.0,
        maximum=1.0,
    ),
    Option("reinitialize", bool, False, "re-initialize the MLP at the start of every epoch (Algorithm 1, line 4)"),
    _ablation("negatives_only", bool, False, "exclude the positive pair from the partition function that the MLP fits"),
    _ablation(
        "gather_stage2",
        bool,
        False,
        "use the global batch in AmorLIP's stage II, not each process's own batch",
    ),
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
        "schedule of gamma: constant, or cosine from 1 to gamma over gamma_decay_epochs",
        choices=("constant", "cosine"),
    ),
    Option(
        "gamma_decay_epochs",
        int,
        None,
        "epochs until gamma reaches its final value; none: half of the run",
        symbol="E",
        minimum=1,
        nullable=True,
    ),
    Option(
        "restart_every",
        int,
        500,
        "steps between two restarts of the prototypes; none: never",
        symbol="T_r",
        minimum=1,
        nullable=True,
    ),
    _ablation("normalizer_reset", bool, True, "clear AdaGrad's accumulators when the prototypes restart"),
    _ablation(
        "simultaneous", bool, False, "predict log-normalizers before this step's updates (NeuCLIP's Algorithm 3)"
    ),
    Option(
        "verify_fit",
        bool,
        False,
        "use the fitted prototypes only if they predict a new batch better than recent embeddings do; off: always, as in the "
        "paper",
    ),
    Option("local_loss", bool, False, "compute only this process's rows of the logits", openclip_flag=True),
    Option("gather_with_grad", bool, False, "gather the features with their gradient", openclip_flag=True),
    Option("coca_caption_loss_weight", float, 2.0, "weight of CoCa's caption loss", openclip_flag=True),
    Option("coca_contrastive_loss_weight", float, 1.0, "weight of CoCa's contrastive loss", openclip_flag=True),
    Option(
        "batch_weight",
        float,
        0.5,
        "share of the current batch in queueclip's normalizer; pair weights are at most 1 divided by this share",
        symbol="λ",
        minimum=0.0,
        maximum=1.0,
    ),
    _ablation(
        "leave_own_out",
        bool,
        False,
        "exclude the anchor's positive pair from the queue: the estimation error is smaller, but only batch_weight limits the "
        "weights",
    ),
    Option(
        "kappa",
        float,
        10.0,
        "log of the mirror-descent step size: the new estimate has the weight sigmoid(log u + kappa) in the moving average u",
        symbol="κ",
    ),
    Option(
        "loss_dist_impl",
        str,
        None,
        "how SigLIP communicates features between processes",
        choices=("bidir", "shift", "reduce", "gather"),
        nullable=True,
        openclip_flag=True,
    ),
)

# An alternative to the option rho, as a fraction from 0 to 1.
HARD_SHARE = Option(
    "hard_share",
    float,
    None,
    "fraction of the data that counts as hard; sets rho to -log of this fraction",
    symbol="exp(−ρ)",
    exclusive_minimum=0.0,
    maximum=1.0,
)

# The options of all losses by name. ``registry.register_method`` adds options of losses outside this package.
OPTIONS: dict[str, Option] = {option.name: option for option in PACKAGE_OPTIONS}


# Descriptions of this package's losses, by name.
SUMMARIES = {
    "amorlip": "AmorLIP: log-normalizers predicted from the embedding by a multi-layer perceptron.",
    "cliplite": "CLIP-Lite: a Jensen-Shannon bound on the mutual information, one negative per pair, without normalizers.",
    "fastclip": "FastCLIP: a moving average for each sample, with a schedule of its weight γ, and one learned temperature.",
    "fastclip-v0": "FastCLIP-v0: like fastclip, but without the factor τ and without ρ in the loss.",
    "fastclip-v1": "FastCLIP-v1: like fastclip, but at a constant temperature.",
    "fastclip-v2": "FastCLIP-v2: like fastclip, but with a learned temperature for each sample and side.",
    "fastclip-v3": "FastCLIP-v3: another name of fastclip.",
    "isogclr": "iSogCLR: SogCLR with a learned temperature for each sample and side. FastCLIP-v2 has the same temperatures.",
    "neuclip": "NeuCLIP: log-normalizers predicted by prototypes that are trained inside each step, if the fit is good.",
    "neuclip-paper": "NeuCLIP as published: like neuclip, but with a learned temperature, and without verify_fit.",
    "openclip": "OpenCLIP's ClipLoss, and CoCaLoss for captioners: the softmax over the batch. Its arithmetic is unchanged.",
    "queueclip": "NeuCLIP with a queue of recent embeddings instead of trained prototypes. There is no paper.",
    "scent": "SCENT: like fastclip, but the weight γ of the moving average depends on each sample's normalizer.",
    "siglip": "OpenCLIP's SigLipLoss: a sigmoid for each pair of the batch. Its arithmetic is unchanged.",
    "simclr": "SimCLR: two augmented views of each image, contrasted with all other views of the batch, without texts.",
    "sogclr": "SogCLR: a moving average for each sample instead of the batch's normalizer, at a constant temperature.",
    "tempnet": "TempNet: temperatures predicted from the embeddings by a small network, with FastCLIP's moving averages.",
}


def refuse_unknown_loss(name: str, known: Collection[str]) -> None:
    """Raise OptionError if ``name`` is not in ``known``. The message suggests a similar name, if there is one."""
    if name in known:
        return
    expected, module = f"expected one of {', '.join(known)}, or my.module:METHOD", str(name).removesuffix(".py")
    hint = f"; did you mean {LOSSES[name]}?" if name in LOSSES else nearest(str(name), known)
    if os.path.isfile(f"{module}.py"):
        hint = f". For the loss in {module}.py, give --loss {module}:METHOD"
    raise OptionError("loss", f"unknown loss {name!r}: {expected}{hint}")


def rho_of(hard_share: float) -> float:
    """Return ρ for a value of the option ``hard_share``: ``−log(hard_share)``."""
    return -math.log(hard_share)
