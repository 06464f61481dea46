"""Cases of all losses and their options, with naive references. Tests run them in one or two processes, and resume them."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from openclip_ext.contrastive.loss import HARD_NEGATIVES, ContrastiveLoss
from openclip_ext.contrastive.seeding import generator
from openclip_ext.losses import options, registry
from openclip_ext.losses.amorlip import TwoSidedMlp
from openclip_ext.losses.registry import create_loss
from openclip_ext.losses.tempnet import TemperatureNetwork
from tests.references import contrastive, networks, prototypes, steering, two_views

WIDTH = 8
SAMPLES = 20
EPS = 1e-14
EPOCHS = 4


@dataclass
class Case:
    """A loss with certain options, and its naive reference.

    Attributes:
        loss: name of the loss for ``create_loss``.
        reference: function that creates the reference, with random initial values copied from the created loss.
        options: options for ``create_loss``.
        tolerance: relative and absolute tolerance of the comparison with the reference, in float64.
        prepare: function that changes the created loss in place before its first call.
    """

    loss: str
    reference: Callable[[ContrastiveLoss], Any] | None
    options: dict[str, Any] = field(default_factory=dict)
    tolerance: float = 1e-9
    prepare: Callable[[ContrastiveLoss], None] = lambda loss: None

    def create(self, **more: Any) -> ContrastiveLoss:
        """Return a new loss of this case; ``more`` are further options."""
        loss = create_loss(self.loss, embed_dim=WIDTH, num_samples=SAMPLES, **(self.options | more))
        self.prepare(loss)
        return loss


def _average(gamma: float = 0.2, decay_epochs: int | None = 2, eps: float = EPS) -> contrastive.MovingAverage:
    return contrastive.MovingAverage(eps, gamma, decay_epochs)


def _fastclip(kind: str, **average: Any) -> Callable[[ContrastiveLoss], Any]:
    rho = {"global": 6.5}.get(kind, 0.0)
    return lambda loss: contrastive.FastClip(_average(**average), kind, rho)


def _scent(**options: float) -> Case:
    kappa = options.get("kappa", 10.0)
    return Case("scent", lambda loss: contrastive.FastClip(contrastive.Scent(EPS, kappa), "global", 6.5), options)


def _per_sample(**average: Any) -> Callable[[ContrastiveLoss], Any]:
    return lambda loss: contrastive.PerSample(_average(**average), rho=7.0, start=0.05, bounds=(0.01, 1.0), lr=0.0133)


def _solved(m: int, rho: float) -> Case:
    def end_waiting(loss: ContrastiveLoss) -> None:
        loss.calls = 100
        loss.temperature.steps.fill_(100)

    return Case(
        "sogclr",
        lambda loss: contrastive.Solved(_average(gamma=0.8, decay_epochs=None), rho, m),
        {
            "temperature_scheme": "solved",
            "temperature": None,
            "temperature_queue": m,
            "rho": rho,
            "temperature_min": 0.01,
        },
        prepare=end_waiting,
    )


_NEUCLIP = {"prototypes": 9, "restart_every": 3, "normalizer_updates": 2}


def _neuclip(**changed: Any) -> Case:
    options = _NEUCLIP | {"verify_fit": False} | changed

    name = "neuclip" if options["verify_fit"] else "neuclip-paper"

    # AdaGrad's first step depends only on the gradient's sign. This amplifies rounding errors of gradients near zero.
    reference = partial(prototypes.NeuClip, **options, eps=EPS, rho=6.5)
    return Case(name, lambda loss: reference(), options | {"temperature_scheme": "global"}, tolerance=1e-7)


def _queueclip(m: int, weight: float, leave_own_out: bool = False) -> Case:
    options = {"prototypes": m, "batch_weight": weight, "leave_own_out": leave_own_out}
    scheme = {"temperature_scheme": "global"}
    return Case("queueclip", lambda loss: prototypes.QueueClip(**options, eps=EPS, rho=6.5), options | scheme)


def _two_views(name: str, **options: Any) -> Case:
    average = None
    if name != "simclr":
        average = options.get("gamma", 0.8), options.get("gamma_decay_epochs"), options.get("eps", EPS)
    tau = options.get("temperature", 0.1)
    learned = (7.0, 0.0133) if name == "isogclr" else None
    return Case(name, lambda loss: two_views.TwoViews(loss.projector, tau, average, learned), options)


_AMORLIP = {
    "normalizer_updates": 2,
    "fit_every": 2,
    "target_every": 1,
    "ema_decay": 0.6,
    "previous_weight": 0.8,
    "epochs": EPOCHS,
    "normalizer_lr": 0.01,
    "rho_end": None,
}


def mlps(ours: TwoSidedMlp) -> list[networks.Mlp]:
    """Return the reference's networks for both sides, with the weights of the package's networks."""
    both = []
    for side in (0, 1):
        theirs = networks.Mlp(*ours.weights[0].shape[1:])
        layers = [theirs.body[0], theirs.body[3], theirs.head]
        norms = [theirs.body[2], theirs.body[5]]
        with torch.no_grad():
            for layer, weight, bias in zip(layers, ours.weights, ours.biases, strict=True):
                layer.weight.copy_(weight[side].T)
                layer.bias.copy_(bias[side, 0])
            for norm, scale, shift in zip(norms, ours.scales, ours.shifts, strict=True):
                norm.weight.copy_(scale[side, 0])
                norm.bias.copy_(shift[side, 0])
        both.append(theirs)
    return both


def _amortized(loss: ContrastiveLoss, options: dict[str, Any]) -> networks.AmortizedPartition:
    def fresh(epoch: int) -> list[networks.Mlp]:
        width = loss.normalizer.online.weights[0].shape[1]
        anew = create_loss(loss_name, embed_dim=width, **options).double().normalizer
        anew.start_epoch(epoch)
        return mlps(anew.online)

    loss_name = "neuclip-paper" if options.get("normalizer") == "mlp" else "amorlip"
    names = {field.name for field in fields(networks.AmortizedPartition)}
    return networks.AmortizedPartition(
        mlps(loss.normalizer.online),
        fresh=fresh if options.get("reinitialize", loss_name == "amorlip") else None,
        **{name: value for name, value in options.items() if name in names},
    )


def _amorlip(**changed: Any) -> Case:
    options = _AMORLIP | {"gather_stage2": True} | changed
    return Case(
        "amorlip",
        lambda loss: networks.AmorLip(_amortized(loss, options), 6.5, options.get("negatives_only", False)),
        options,
        tolerance=1e-8,
    )


def _neuclip_mlp(objective: str) -> Case:
    options = {name: value for name, value in _AMORLIP.items() if name != "rho_end"}
    options |= {"normalizer": "mlp", "normalizer_objective": objective}
    return Case(
        "neuclip-paper", lambda loss: networks.NeuClipMlp(_amortized(loss, options), EPS, 6.5), options, tolerance=1e-6
    )


def _tempnet(loss: ContrastiveLoss) -> networks.TempNet:
    ours: TemperatureNetwork = loss.temperature.network
    both = []
    for side in (0, 1):
        theirs = networks.TemperatureNet(*ours.prototypes.shape[:0:-1])
        with torch.no_grad():
            theirs.linear.weight.copy_(ours.weight[side].T)
            theirs.linear.bias.copy_(ours.bias[side, 0])
            theirs.prototypes.copy_(ours.prototypes[side])
            theirs.phi.copy_(ours.log_sharpness[side, 0, 0])
        both.append(theirs)

    def keep(call: int, batch: int) -> Tensor:
        return (
            torch.rand(
                2, batch, ours.weight.shape[1], generator=generator("cpu", loss.temperature.seed, "dropout", call)
            )
            >= 0.5
        )

    return networks.TempNet(both, _average(), rho=9.5, bounds=(0.01, 1.0), lr=1e-3, keep=keep)


_DECAY = {"gamma_decay_epochs": 2}

CASES: dict[str, Case] = {
    "sogclr": Case("sogclr", _fastclip("constant", gamma=0.8, decay_epochs=None)),
    "fastclip": Case("fastclip", _fastclip("global"), _DECAY),
    "fastclip-large-eps": Case("fastclip", _fastclip("global", eps=0.05), _DECAY | {"eps": 0.05}),
    "fastclip-minibatch": Case(
        "fastclip",
        lambda loss: contrastive.FastClip(contrastive.MiniBatch(EPS), "global", 6.5),
        {"normalizer": "minibatch"},
    ),
    "fastclip-v0": Case("fastclip-v0", _fastclip("unscaled"), _DECAY),
    "fastclip-v1": Case("fastclip-v1", _fastclip("constant"), _DECAY),
    "isogclr": Case("isogclr", _per_sample(gamma=0.8, decay_epochs=None), {"temperature": 0.05}),
    "fastclip-v2": Case("fastclip-v2", _per_sample(), _DECAY | {"temperature": 0.05}),
    "scent": _scent(),
    "scent-small-steps": _scent(kappa=3.0),
    "openclip-constant": Case(
        "openclip",
        lambda loss: contrastive.InfoNce(0.05),
        {"temperature_scheme": "constant", "temperature": 0.05},
    ),
    "openclip-learned": Case("openclip", lambda loss: contrastive.InfoNce(None), {"temperature_scheme": "global"}),
    "sogclr-solved": _solved(9, 1.2),
    "sogclr-solved-longer-queue": _solved(14, 0.4),
    "tempnet": Case("tempnet", _tempnet, _DECAY | {"lr_tau": 1e-3}),
    "amorlip": _amorlip(),
    "amorlip-negatives": _amorlip(negatives_only=True),
    "amorlip-kl-printed": _amorlip(normalizer_objective="kl-printed", reinitialize=False),
    "amorlip-kl": _amorlip(normalizer_objective="kl", l2_log_weight=0.7),
    "amorlip-js": _amorlip(normalizer_objective="js", fit_every=1, target_every=2),
    "neuclip": _neuclip(),
    "neuclip-few": _neuclip(prototypes=4),
    "neuclip-many": _neuclip(prototypes=25, restart_every=2),
    "neuclip-never": _neuclip(restart_every=None),
    "neuclip-keep-accumulators": _neuclip(normalizer_reset=False, normalizer_lr=0.01),
    "neuclip-l2-log": _neuclip(normalizer_objective="l2-log"),
    "neuclip-simultaneous": _neuclip(simultaneous=True),
    "neuclip-no-update": _neuclip(normalizer_updates=0),
    "neuclip-no-alpha-gradient": _neuclip(alpha_gradient=False),
    "neuclip-alpha-tau-gradient": _neuclip(alpha_tau_gradient=True),
    "neuclip-verified": _neuclip(verify_fit=True),
    "neuclip-verified-never": _neuclip(verify_fit=True, restart_every=None, normalizer_lr=0.1),
    "neuclip-verified-many": _neuclip(verify_fit=True, prototypes=25, restart_every=4),
    "neuclip-verified-simultaneous": _neuclip(verify_fit=True, simultaneous=True, normalizer_lr=0.1),
    "neuclip-verified-no-update": _neuclip(verify_fit=True, normalizer_updates=0),
    "neuclip-mlp": _neuclip_mlp("unified"),
    "neuclip-mlp-separate": _neuclip_mlp("l2-log"),
    "queueclip": _queueclip(9, 0.5),
    "queueclip-few": _queueclip(4, 0.5),
    "queueclip-many": _queueclip(25, 0.3),
    "queueclip-queue-alone": _queueclip(9, 0.0),
    "queueclip-others-alone": _queueclip(9, 0.0, leave_own_out=True),
    "queueclip-others-many": _queueclip(25, 0.4, leave_own_out=True),
    "queueclip-others-few": _queueclip(4, 0.3, leave_own_out=True),
    "simclr": _two_views("simclr"),
    "simclr-embeddings-width": _two_views("simclr", projection_dim=None, temperature=0.5),
    "isogclr-views": _two_views("isogclr", views=2),
    "isogclr-views-cosine": _two_views(
        "isogclr", views=2, eps=0.05, gamma=0.2, gamma_schedule="cosine", gamma_decay_epochs=2, temperature=0.05
    ),
    "sogclr-views": _two_views("sogclr", views=2, projection_dim=5),
    "sogclr-views-cosine": _two_views(
        "sogclr", views=2, eps=0.5, gamma=0.2, gamma_schedule="cosine", gamma_decay_epochs=2
    ),
    "queueclip-batch-alone": _queueclip(6, 1.0),
}

# Cases that also run with ``equal_captions`` set to mask and to positive. The steps of make_steps contain equal captions.
_WITH_POSITIVES = (
    "sogclr",
    "fastclip",
    "fastclip-minibatch",
    "fastclip-v0",
    "isogclr",
    "scent",
    "tempnet",
    "neuclip",
    "neuclip-verified",
    "neuclip-mlp",
    "queueclip",
    "queueclip-few",
    "queueclip-many",
    "queueclip-others-alone",
    "sogclr-solved",
)
CASES |= {
    f"{name}-{choice}": replace(
        CASES[name], options=CASES[name].options | {"equal_captions": choice}, tolerance=10 * CASES[name].tolerance
    )
    for choice, names in {
        "mask": (*_WITH_POSITIVES, "amorlip", "amorlip-negatives", "openclip-learned"),
        "positive": _WITH_POSITIVES,
    }.items()
    for name in names
}


# Cases that differ from another case only in option values or parts. Only two kinds of tests use them: comparisons with
# references, and tests in two processes.
_OTHER_NUMBERS = {
    "scent-small-steps",
    *("fastclip-large-eps", "sogclr-solved-longer-queue", "isogclr-views-cosine", "sogclr-views-cosine"),
    *(f"neuclip-{name}" for name in ("few", "many", "never", "no-update")),
    *(f"neuclip-verified-{name}" for name in ("never", "many", "simultaneous", "no-update")),
    *("queueclip-few", "queueclip-many", "queueclip-others-few", "queueclip-others-many", "simclr-embeddings-width"),
    *(
        f"{name}-{choice}"
        for name in ("sogclr", "fastclip-minibatch", "fastclip-v0", "scent", "queueclip-few", "queueclip-many")
        for choice in ("mask", "positive")
    ),
    *("neuclip-verified-mask", "neuclip-verified-positive"),
}


def restore_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Restore the registered losses, parts and options after the test."""
    for name in ("METHODS", "OPTIONS", "CHOICES"):
        copied = dict(getattr(registry, name))
        for module in (registry, options):
            monkeypatch.setattr(module, name, copied, raising=False)


def unit(features: Tensor) -> Tensor:
    """Return the features with unit norm in each row."""
    return torch.nn.functional.normalize(features, dim=1)


# A reference model's embeddings of all samples: a table of images, and a table of texts.
REFERENCE_WIDTH = 5
REFERENCE_TABLES = tuple(
    unit(torch.randn(SAMPLES, REFERENCE_WIDTH, generator=torch.Generator().manual_seed(side), dtype=torch.float64))
    for side in (0, 1)
)
# The same of a reference model that finds some samples alike.
_random = torch.Generator().manual_seed(3)
_images = unit(torch.randn(SAMPLES, REFERENCE_WIDTH, generator=_random, dtype=torch.float64))
_noise = torch.randn(SAMPLES, REFERENCE_WIDTH, generator=_random, dtype=torch.float64)
GUIDE_TABLES, MASK_MARGIN = (_images, unit(_images + 0.2 * _noise)), 0.25


def reference_of(loss: ContrastiveLoss, index: Iterable[int], unread: Iterable[int] = ()) -> dict[str, Any]:
    """Return the keyword argument with the reference embeddings of samples; an empty dict if the loss does not use them.

    The rows of the samples ``unread`` are zero.
    """
    if not loss.reference_dim:
        return {}
    rows = list(index)
    read = torch.tensor([[row not in unread] for row in rows])
    tables = REFERENCE_TABLES if getattr(loss, "mask_margin", None) is None else GUIDE_TABLES
    return {"reference": tuple(table[rows] * read for table in tables)}


def _with_reference(plain: str, steer: bool = True, distill: float = 0.0, tables: Any = REFERENCE_TABLES) -> Case:
    case = CASES[plain]
    ours = {"steer": steer, "distill": distill, "reference_temperature": 0.2}

    def reference(loss: ContrastiveLoss) -> Any:
        learns = loss.learns_logit_scale
        return steering.WithReference(case.reference(loss), tables, steer, distill, 0.2, learns)

    tolerance = max(case.tolerance, 1e-7)  # because gradients are larger with a reference model
    return replace(
        case, reference=reference, tolerance=tolerance, options=case.options | ours | {"reference_dim": REFERENCE_WIDTH}
    )


def _guided(plain: str, steer: bool = False) -> Case:
    case = _with_reference(plain, steer, tables=GUIDE_TABLES)
    return replace(case, options=case.options | {"mask_margin": MASK_MARGIN})


# Cases in which a reference model excludes likely false negatives.
GUIDED = {
    f"{name}-guided": _guided(name)
    for name in ("fastclip", "fastclip-mask", "amorlip", "neuclip", "queueclip", "queueclip-mask", "queueclip-few")
} | {
    "queueclip-steered-guided": _guided("queueclip", steer=True),
    "sogclr-solved-guided": _guided("sogclr-solved"),
    "openclip-learned-guided": _guided("openclip-learned"),
}


# Cases with a reference model. Tests of these cases must pass its embeddings in each call.
STEERED = (
    {
        f"{name}-steered": _with_reference(name)
        for name in ("fastclip", "fastclip-v2", "scent", "amorlip", "tempnet", "neuclip", "queueclip", "sogclr-solved")
    }
    | {
        "fastclip-distilled": _with_reference("fastclip", steer=False, distill=0.3),
        "queueclip-steered-distilled": _with_reference("queueclip", distill=0.3),
    }
    | GUIDED
)


# Cases that also run with hard negatives.
HARD = [
    *("sogclr", "fastclip", "fastclip-large-eps", "fastclip-minibatch", "fastclip-v0", "isogclr", "scent", "tempnet"),
    *("openclip-constant", "openclip-learned", "sogclr-solved", "amorlip", "amorlip-negatives", "neuclip-mlp"),
    *("neuclip", "neuclip-verified", "neuclip-alpha-tau-gradient", "neuclip-no-alpha-gradient"),
    *("queueclip", "queueclip-queue-alone", "queueclip-others-alone", "queueclip-batch-alone", "fastclip-distilled"),
    *("fastclip-mask", "fastclip-positive", "neuclip-mask", "isogclr-positive", "openclip-learned-mask"),
]


def kinds() -> list[str]:
    """Return the names of all cases except those that differ from another case only in option values or parts."""
    assert CASES.keys() >= _OTHER_NUMBERS
    return [name for name in CASES if name not in _OTHER_NUMBERS]


def create_any(name: str, **options: Any) -> ContrastiveLoss:
    """Return the loss of the case ``name``. If there is no such case, return the registry's loss with default options."""
    if name in CASES:
        return CASES[name].create(**options)
    return create_loss(name, embed_dim=WIDTH, num_samples=SAMPLES, **options)


def assert_close(actual: Any, expected: Any, tolerance: float = 0.0) -> None:
    """Assert that nested tensors differ by at most ``tolerance``, relative or absolute. NaN equals NaN."""
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance, equal_nan=True)


def copy_tensors(loss: ContrastiveLoss) -> dict[str, Tensor]:
    """Return a copy of the loss's state without its counters, which change in every call."""
    state = loss.state_dict().items()
    return {key: value.clone() for key, value in state if not key.endswith("_extra_state")}


@dataclass
class Step:
    """The inputs of a loss in one step."""

    images: Tensor
    texts: Tensor
    logit_scale: float
    index: list[int]
    epoch: int
    labels: list[Any] = field(default_factory=list)
    unread: list[int] = field(default_factory=list)  # indices of samples whose reference embeddings are zero
    hard: Tensor | None = None  # features of hard negatives


class TwoTowers(nn.Module):
    """A model of two linear encoders, with the parameters ``logit_scale`` and ``logit_bias`` like OpenCLIP's models."""

    def __init__(
        self, inputs: int, width: int, logit_scale: float | None = None, logit_bias: float | None = -10.0
    ) -> None:
        super().__init__()
        self.image, self.text = (nn.Linear(inputs, width, bias=False) for _ in range(2))
        self.logit_scale = nn.Parameter(torch.tensor(math.log(1 / 0.07) if logit_scale is None else logit_scale))
        self.logit_bias = None if logit_bias is None else nn.Parameter(torch.tensor(logit_bias))

    def forward(self, images: Tensor, texts: Tensor) -> dict[str, Tensor | None]:
        return {
            "image_features": unit(self.image(images)),
            "text_features": unit(self.text(texts)),
            "logit_scale": self.logit_scale.exp(),
            "logit_bias": self.logit_bias,
        }


def make_steps(number: int = 5, batch: int = 6, seed: int = 0, duplicates: bool = True) -> list[Step]:
    """Return steps with random batches of similar pairs. With ``duplicates``, an index occurs 3 times in every third batch."""
    random = torch.Generator().manual_seed(seed)
    random_labels = torch.Generator().manual_seed(seed)
    steps = []
    for position in range(number):
        images = unit(torch.randn(batch, WIDTH, generator=random, dtype=torch.float64))
        texts = unit(images + 0.3 * torch.randn(batch, WIDTH, generator=random, dtype=torch.float64))
        index = torch.randperm(SAMPLES, generator=random)[:batch].tolist()
        if duplicates and position % 3 == 1:
            index[-1] = index[0]
            if batch > 4:
                index[3] = index[0]
        labels = [0, *torch.randint(1, max(2, batch - 2), (batch - 1,), generator=random_labels).tolist()]
        steps.append(Step(images, texts, 6.0 + 3 * position, index, position // 2, labels))
    return steps


def add_hard_negatives(steps: Iterable[Step]) -> None:
    """Give each sample of the steps a hard negative, which is similar to its text."""
    random = torch.Generator().manual_seed(7)
    for step in steps:
        noise = torch.randn(step.texts.shape, generator=random, dtype=torch.float64)
        step.hard = unit(step.texts + 0.4 * noise)


def run_step(
    loss: ContrastiveLoss,
    step: Step,
    dtype: torch.dtype = torch.float64,
    autocast: torch.dtype | None = None,
    more: Iterable[Tensor] = (),
) -> tuple[Tensor, list[Tensor]]:
    """Call the loss; return its value and its gradients: of images, texts, scale, hard negatives (if any) and ``more``."""
    loss.start_epoch(step.epoch)
    given = [values for values in (step.images, step.texts, step.hard) if values is not None]
    images, texts, *hard = (features.to(dtype, copy=True).requires_grad_() for features in given)
    wide = torch.promote_types(dtype, torch.float32)
    logit_scale = torch.tensor(step.logit_scale, dtype=wide, requires_grad=True)
    with torch.autocast("cpu", autocast, enabled=autocast is not None):
        positives = {"positives": torch.tensor(step.labels)} if loss.needs_positives else {}
        named = positives | reference_of(loss, step.index, step.unread)
        named |= {HARD_NEGATIVES: hard[0]} if hard else {}
        value = loss(images, texts, logit_scale, index=torch.tensor(step.index), **named)
    gradients = torch.autograd.grad(value, (images, texts, logit_scale, *hard, *more), allow_unused=True)
    return value.detach(), [torch.zeros(()) if gradient is None else gradient for gradient in gradients]
