"""All losses of this package and their options, without importing torch.

The fields of the dataclasses are the options. They define the flags, the tables in the documentation and the checks of
:func:`openclip_ext.create_loss`. A field's default is the option's default. Losses set other defaults of their parts.
"""

import functools
import math
import os
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from typing import Any

from openclip_ext.cli.options import Option, OptionError, nearest
from openclip_ext.cli.words import LOSSES
from openclip_ext.losses.method import (
    Composed,
    Eps,
    EqualCaptions,
    HasOptions,
    Method,
    NormalizerPart,
    Part,
    ReferencePart,
    Scaled,
    ScaledTwoViews,
    Sizes,
    TemperaturePart,
    TwoViews,
    imported,
    option,
    options_of,
)

# Options that only ablations set.
_ablation = functools.partial(option, ablation=True)

# --- options of several classes --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Seed(HasOptions):
    seed: int = option(0, "seed of the loss's own networks", openclip_flag=True)


@dataclass(frozen=True)
class Epochs(HasOptions):
    epochs: int = option(32, "number of epochs of the run, for schedules", symbol="T", minimum=1, openclip_flag=True)


@dataclass(frozen=True)
class Rho(HasOptions):
    rho: float = option(6.5, "weight of the temperature regularizer; a larger rho lowers the temperature", symbol="ρ")


@dataclass(frozen=True)
class Temperature(HasOptions):
    temperature: float | None = option(
        None,
        "initial temperature, or the value of a constant temperature; none: the model's temperature (OpenCLIP: 0.07)",
        symbol="τ",
        exclusive_minimum=0.0,
    )


@dataclass(frozen=True)
class Bounds(HasOptions):
    temperature_min: float = option(
        0.01, "lower bound of a learned or solved temperature", symbol="τ_0", exclusive_minimum=0.0
    )
    temperature_max: float = option(1.0, "upper bound of a learned or solved temperature", exclusive_minimum=0.0)


@dataclass(frozen=True)
class LearningRate(HasOptions):
    lr_tau: float | None = option(
        None,
        "constant learning rate of the temperature; none: the encoders' learning rate, with its schedule",
        minimum=0.0,
    )


@dataclass(frozen=True)
class Memory(HasOptions):
    prototypes: int = option(4096, "number of prototypes (queueclip: queue length)", symbol="m", minimum=1)
    alpha_gradient: bool = _ablation(
        False, "pass the gradient of the predicted log-normalizers to the encoders (NeuCLIP's equation 12)"
    )


# --- temperature schemes ---------------------------------------------------------------------------------------------

# Expected change of log τ in a run: from OpenCLIP's initial τ, 0.07, to 0.03, as at the end of the papers' runs.
_LOG_TAU_RANGE = math.log(0.07 / 0.03)
_LARGEST_RAISED_RATE = 5e-4
# A run with fewer optimizer steps is too short to train τ.
_FEWEST_STEPS = 100
# A solved temperature starts at a lower value in runs with at least so many steps.
_LONG_RUN_STEPS, _LONG_RUN_TEMPERATURE = 700, 0.07


@dataclass(frozen=True)
class Learned(LearningRate, TemperaturePart):
    """A scheme that trains the model's ``log(1/τ)``. In a short run, ``lr_tau`` is larger, so that τ converges.

    Adam moves a parameter by about its learning rate per step, and the papers' learning rates are for about 10⁵ steps.
    """

    def in_run(self, steps: int) -> TemperaturePart:
        if self.lr_tau is None or steps < _FEWEST_STEPS:
            return self
        return replace(self, lr_tau=max(self.lr_tau, min(_LOG_TAU_RANGE / steps, _LARGEST_RAISED_RATE)))


@dataclass(frozen=True)
class Constant(Temperature, TemperaturePart):
    name = "constant"
    module = "openclip_ext.contrastive.temperature:ConstantTemperature"


@dataclass(frozen=True)
class Unregularized(Learned, Bounds, Temperature):
    """The scheme ``global`` of objectives without a regularizer."""

    name = "global"
    module = "openclip_ext.contrastive.temperature:UnregularizedTemperature"


@dataclass(frozen=True)
class Global(Epochs, Learned, Bounds, Temperature, Rho):
    """The scheme ``global``. With ``slow_when_small``, the learning rate is divided by three while ``τ ≤ 0.03``."""

    name = "global"
    module = "openclip_ext.contrastive.temperature:GlobalTemperature"
    slow_when_small: bool = False
    rho_end: float | None = option(
        None, "value of rho in the last part of the run (see --rho-switch); none: rho is constant", symbol="ρ annealing"
    )
    rho_switch: float = option(
        0.75, "fraction of the epochs after which rho becomes rho_end", symbol="ρ annealing", minimum=0.0, maximum=1.0
    )

    def build(self, sizes: Sizes) -> Any:
        return imported(self.module)(**self.own_values(), slow_when_small=self.slow_when_small)


@dataclass(frozen=True)
class Solved(Bounds, Temperature, Rho, TemperaturePart):
    """A solved temperature (``contrastive/solved_temperature.py``).

    Early in training, embeddings are close together, which moves a solved temperature down to its lower bound. So the lower
    bound is higher than for other schemes. In a short run, the temperature changes little, and a high initial temperature
    gives the best results. In a long run, a lower initial temperature is better.
    """

    name = "solved"
    module = "openclip_ext.contrastive.solved_temperature:SolvedTemperature"
    needs = ("embed_dim",)
    temperature_queue: int = option(
        4096, "number of recent embeddings from which a solved temperature is computed", symbol="m", minimum=2
    )

    def in_run(self, steps: int) -> TemperaturePart:
        return self if steps < _LONG_RUN_STEPS else replace(self, temperature=_LONG_RUN_TEMPERATURE)


@dataclass(frozen=True)
class PerSample(LearningRate, Bounds, Temperature, Rho, TemperaturePart):
    name = "per-sample"
    module = "openclip_ext.losses.isogclr:PerSampleTemperature"
    needs = ("num_samples",)


@dataclass(frozen=True)
class Predicted(Seed, LearningRate, Bounds, Rho, TemperaturePart):
    name = "predicted"
    module = "openclip_ext.losses.tempnet:PredictedTemperature"
    needs = ("embed_dim",)


# --- normalizers -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Minibatch(NormalizerPart):
    name = "minibatch"
    module = "openclip_ext.contrastive.normalizer:MinibatchNormalizer"


@dataclass(frozen=True)
class MovingAverage(Epochs, NormalizerPart):
    name = "moving-average"
    module = "openclip_ext.losses.fastclip:MovingAverageNormalizer"
    needs = ("num_samples",)
    gamma: float = option(
        0.2, "weight of the new estimate in the moving average", symbol="γ_min", minimum=0.0, maximum=1.0
    )
    gamma_schedule: str = option(
        "cosine",
        "schedule of gamma: constant, or cosine from 1 to gamma over gamma_decay_epochs",
        choices=("constant", "cosine"),
    )
    gamma_decay_epochs: int | None = option(
        None, "epochs until gamma reaches its final value; none: half of the run", symbol="E", minimum=1
    )


@dataclass(frozen=True)
class Scent(NormalizerPart):
    name = "scent"
    module = "openclip_ext.losses.scent:ScentNormalizer"
    needs = ("num_samples",)
    kappa: float = option(
        10.0,
        "log of the mirror-descent step size: the new estimate has the weight sigmoid(log u + kappa) in the moving average u",
        symbol="κ",
    )


_OF_NEUCLIP = "openclip_ext.contrastive.objectives:NeuCLIPObjective"


@dataclass(frozen=True)
class Fit(HasOptions):
    """Options of normalizers that are fitted in each step."""

    normalizer_updates: int = option(
        10, "updates of the normalizer network per step", symbol="T_u (NeuCLIP), T_λ (AmorLIP)", minimum=0
    )
    normalizer_lr: float = option(1.0, "learning rate of the normalizer network", minimum=0.0)
    normalizer_objective: str = _ablation(
        "unified",
        "objective that the normalizer network minimizes",
        choices=("unified", "l2-log", "kl", "js", "kl-printed"),
    )


@dataclass(frozen=True)
class Prototypes(Fit, Memory, NormalizerPart):
    name = "prototypes"
    module = "openclip_ext.losses.neuclip:PrototypeNormalizer"
    objective = _OF_NEUCLIP
    needs = ("embed_dim", "reference_dim", "eps")
    lr_tau = 1.25e-4
    restart_every: int | None = option(
        500, "steps between two restarts of the prototypes; none: never", symbol="T_r", minimum=1
    )
    normalizer_reset: bool = _ablation(True, "clear AdaGrad's accumulators when the prototypes restart")
    simultaneous: bool = _ablation(False, "predict log-normalizers before this step's updates (NeuCLIP's Algorithm 3)")
    verify_fit: bool = option(
        False,
        "use the fitted prototypes only if they predict a new batch better than recent embeddings do; off: always, as in the "
        "paper",
    )
    alpha_tau_gradient: bool = _ablation(
        False, "with alpha_gradient: also pass the gradient to a learned temperature (NeuCLIP's Algorithm 1, line 11)"
    )


@dataclass(frozen=True)
class Queue(Memory, NormalizerPart):
    name = "queue"
    module = "openclip_ext.losses.queueclip:QueueNormalizer"
    objective = _OF_NEUCLIP
    needs = ("embed_dim", "reference_dim", "eps")
    lr_tau = 1.25e-4  # NeuCLIP's
    batch_weight: float = option(
        0.5,
        "share of the current batch in queueclip's normalizer; pair weights are at most 1 divided by this share",
        symbol="λ",
        minimum=0.0,
        maximum=1.0,
    )
    leave_own_out: bool = _ablation(
        False,
        "exclude the anchor's positive pair from the queue: the estimation error is smaller, but only batch_weight limits the "
        "weights",
    )


@dataclass(frozen=True)
class Mlp(Fit, Seed, Epochs, NormalizerPart):
    name = "mlp"
    module = "openclip_ext.losses.amorlip:MlpNormalizer"
    objective = _OF_NEUCLIP
    needs = ("embed_dim",)
    l2_log_weight: float = _ablation(0.1, "weight of the l2-log term in kl, js and kl-printed", minimum=0.0)
    width_factor: float = _ablation(
        0.5, "hidden width of the MLP divided by the embedding dimension", symbol="f_d", exclusive_minimum=0.0
    )
    fit_every: int = option(1, "steps between two fits of the MLP", symbol="T_online", minimum=1)
    target_every: int = _ablation(1, "steps between two updates of the target network", symbol="T_target", minimum=1)
    ema_decay: float = _ablation(0.0, "decay of the target network's average", symbol="α", minimum=0.0, maximum=1.0)
    previous_weight: float = _ablation(
        0.0,
        "final weight of the previous epoch's target network in the MLP's target",
        symbol="β_T",
        minimum=0.0,
        maximum=1.0,
    )
    reinitialize: bool = option(False, "re-initialize the MLP at the start of every epoch (Algorithm 1, line 4)")


@dataclass(frozen=True)
class Partition(Mlp):
    """The normalizer ``mlp`` of AmorLIP, which estimates the partition function."""

    module = "openclip_ext.losses.amorlip:PartitionNormalizer"
    negatives_only: bool = _ablation(False, "exclude the positive pair from the partition function that the MLP fits")
    gather_stage2: bool = _ablation(False, "use the global batch in AmorLIP's stage II, not each process's own batch")


@dataclass(frozen=True)
class UncenteredMovingAverage(Eps, MovingAverage):
    """SogCLR's moving average for two views."""

    module = "openclip_ext.losses.sogclr:UncenteredMovingAverage"


PREDICTED = Predicted(lr_tau=3e-5, rho=9.5)
PER_SAMPLE = PerSample(temperature=0.03, lr_tau=0.0133, rho=7.0)
SOLVED = Solved(rho=4.0, temperature=0.1, temperature_min=0.03)
# The queue reduces the variance of the encoders' gradient only if it includes the gradient through α.
QUEUE = Queue(alpha_gradient=True)

# The parts that users can choose by name, with their defaults in losses that declare no others. ``registry.register_method``
# adds the parts of losses outside this package.
CHOICES: dict[tuple[str, str], Part] = {
    (part.kind, part.name): part
    for part in (
        Constant(),
        Global(),
        SOLVED,
        PER_SAMPLE,
        PREDICTED,
        Minibatch(),
        Mlp(normalizer_lr=1e-3),
        MovingAverage(),
        Prototypes(),
        QUEUE,
        Scent(),
    )
}


# --- losses ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ClipLite(Seed, Temperature, Method):
    module = "openclip_ext.losses.cliplite:ClipLiteLoss"
    head = "openclip_ext.losses.cliplite:Projections"
    needs = ("embed_dim",)
    projection_dim: int | None = option(
        None, "dimension of the loss's projection of the embeddings; none: the embedding dimension", minimum=1
    )


_AMORLIPS_MLP = Partition(
    normalizer_objective="l2-log",
    normalizer_updates=3,
    normalizer_lr=1e-3,
    fit_every=8,
    target_every=2,
    ema_decay=0.999,
    previous_weight=0.8,
    reinitialize=True,
)


@dataclass(frozen=True)
class OpenClip(EqualCaptions, Method):
    module = "openclip_ext.losses.openclip:OpenClipLoss"
    composed = Composed(
        "openclip",
        Minibatch(),
        Unregularized(),
        objective="openclip_ext.losses.openclip:InfoNce",
        other_parts=(_AMORLIPS_MLP,),
    )
    local_loss: bool = option(False, "compute only this process's rows of the logits", openclip_flag=True)
    gather_with_grad: bool = option(False, "gather the features with their gradient", openclip_flag=True)
    coca_caption_loss_weight: float = option(2.0, "weight of CoCa's caption loss", openclip_flag=True)
    coca_contrastive_loss_weight: float = option(1.0, "weight of CoCa's contrastive loss", openclip_flag=True)


@dataclass(frozen=True)
class Siglip(Method):
    module = "openclip_ext.losses.openclip:SiglipLoss"
    loss_dist_impl: str | None = option(
        None,
        "how SigLIP communicates features between processes",
        choices=("bidir", "shift", "reduce", "gather"),
        openclip_flag=True,
    )


_CONSTANT_GAMMA = MovingAverage(gamma=0.8, gamma_schedule="constant")
_SLOW = Global(lr_tau=2e-4, slow_when_small=True)

AMORLIP = Composed(
    "amorlip",
    _AMORLIPS_MLP,
    replace(_SLOW, rho_end=-8.0),
    objective="openclip_ext.losses.amorlip:PartitionObjective",
    summary="AmorLIP: log-normalizers predicted from the embedding by a multi-layer perceptron.",
)
FASTCLIP = Scaled(
    "fastclip",
    MovingAverage(),
    _SLOW,
    summary="FastCLIP: a moving average for each sample, with a schedule of its weight γ, and one learned temperature.",
)
NEUCLIP_PAPER = Scaled(
    "neuclip-paper",
    Prototypes(alpha_gradient=True),
    Global(),
    summary="NeuCLIP as published: like neuclip, but with a learned temperature, and without verify_fit.",
)
# With a solved temperature and a verified fit, no run collapsed (docs/methods/neuclip.md).
NEUCLIP = Scaled(
    "neuclip",
    Prototypes(alpha_gradient=True, verify_fit=True),
    SOLVED,
    pretrained_scheme="global",
    summary="NeuCLIP: log-normalizers predicted by prototypes that are trained inside each step, if the fit is good.",
)

# The losses of this package by name.
PACKAGE_METHODS: dict[str, Method] = {
    method.name: method
    for method in (
        AMORLIP,
        ClipLite(
            "cliplite",
            temperature=0.07,
            summary="CLIP-Lite: a Jensen-Shannon bound on the mutual information, one negative per pair, without normalizers.",
        ),
        FASTCLIP,
        Scaled(
            "fastclip-v0",
            MovingAverage(),
            Unregularized(),
            objective="openclip_ext.losses.fastclip:Ratio",
            summary="FastCLIP-v0: like fastclip, but without the factor τ and without ρ in the loss.",
        ),
        replace(
            FASTCLIP,
            name="fastclip-v1",
            temperature_scheme=Constant(),
            summary="FastCLIP-v1: like fastclip, but at a constant temperature.",
        ),
        replace(
            FASTCLIP,
            name="fastclip-v2",
            temperature_scheme=PER_SAMPLE,
            summary="FastCLIP-v2: like fastclip, but with a learned temperature for each sample and side.",
        ),
        replace(FASTCLIP, name="fastclip-v3", summary="FastCLIP-v3: another name of fastclip."),
        Scaled(
            "isogclr",
            _CONSTANT_GAMMA,
            PER_SAMPLE,
            two_views=ScaledTwoViews(
                "isogclr with views=2",
                _CONSTANT_GAMMA,
                PerSample(temperature=0.1, lr_tau=0.0133, rho=7.0),
                projection_dim=128,
            ),
            summary="iSogCLR: SogCLR with a learned temperature for each sample and side. FastCLIP-v2 has the same "
            "temperatures.",
        ),
        NEUCLIP,
        NEUCLIP_PAPER,
        OpenClip(
            "openclip",
            summary="OpenCLIP's ClipLoss, and CoCaLoss for captioners: the softmax over the batch. Its arithmetic is "
            "unchanged.",
        ),
        Scaled(
            "queueclip",
            QUEUE,
            SOLVED,
            summary="NeuCLIP with a queue of recent embeddings instead of trained prototypes. There is no paper.",
        ),
        Scaled(
            "scent",
            Scent(),
            _SLOW,
            summary="SCENT: like fastclip, but the weight γ of the moving average depends on each sample's normalizer.",
        ),
        Siglip(
            "siglip",
            summary="OpenCLIP's SigLipLoss: a sigmoid for each pair of the batch. Its arithmetic is unchanged.",
        ),
        TwoViews(
            "simclr",
            Minibatch(),
            Constant(temperature=0.1),
            objective="openclip_ext.losses.simclr:InfoNce",
            projection_dim=128,
            summary="SimCLR: two augmented views of each image, contrasted with all other views of the batch, without texts.",
        ),
        Scaled(
            "sogclr",
            _CONSTANT_GAMMA,
            Constant(),
            two_views=TwoViews(
                "sogclr with views=2",
                UncenteredMovingAverage(gamma=0.8, gamma_schedule="constant"),
                Constant(temperature=0.1),
                objective="openclip_ext.losses.sogclr:Decoupled",
                projection_dim=128,
            ),
            summary="SogCLR: a moving average for each sample instead of the batch's normalizer, at a constant temperature.",
        ),
        replace(
            FASTCLIP,
            name="tempnet",
            temperature_scheme=PREDICTED,
            summary="TempNet: temperatures predicted from the embeddings by a small network, with FastCLIP's moving averages.",
        ),
    )
}
SUMMARIES = {name: method.summary for name, method in PACKAGE_METHODS.items()}

# --- the table of options --------------------------------------------------------------------------------------------

# The options that choose parts of a loss.
PARTS = ("normalizer", "temperature_scheme")
REFERENCE_OPTIONS = frozenset(options_of(ReferencePart))  # options that need a reference model
_CHOOSING = (
    Option("normalizer", str, None, "estimator of the log-normalizers (default: the loss's own)", nullable=True),
    Option("temperature_scheme", str, None, "source of the temperature (default: the loss's own)", nullable=True),
    Option(
        "views",
        int,
        1,
        "1: compare images with texts; 2: compare two augmented views of each image, without texts",
        minimum=1,
        maximum=2,
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
OPTIONS: dict[str, Option] = {choosing.name: choosing for choosing in _CHOOSING}


def add_options(objects: Iterable[HasOptions]) -> None:
    """Add the options of losses and parts to :data:`OPTIONS`, and the parts' names to the choices of ``PARTS``."""
    for item in objects:
        for part in item.flattened():
            OPTIONS.update({name: kept for name, kept in options_of(type(part)).items() if name not in OPTIONS})
    for kind in PARTS:
        OPTIONS[kind] = replace(OPTIONS[kind], choices=tuple(name for part, name in CHOICES if part == kind))


add_options((EqualCaptions(), ReferencePart(), Eps(), *CHOICES.values(), *PACKAGE_METHODS.values()))


def refuse_unknown_loss(name: str, known: Collection[str]) -> None:
    """Raise OptionError if ``name`` is not in ``known``. The message suggests a similar name, if there is one."""
    if name in known:
        return
    expected, module = f"expected one of {', '.join(known)}, or my.module:METHOD", str(name).removesuffix(".py")
    hint = f"; did you mean {LOSSES[name]}?" if name in LOSSES else nearest(str(name), known)
    if os.path.isfile(f"{module}.py"):
        dotted = os.path.normpath(module).replace(os.sep, ".")
        hint = f". For the loss in {module}.py, give --loss {dotted}:METHOD"
    raise OptionError("loss", f"unknown loss {name!r}: {expected}{hint}")


def rho_of(hard_share: float) -> float:
    """Return ρ for a value of the option ``hard_share``: ``−log(hard_share)``."""
    return -math.log(hard_share)
