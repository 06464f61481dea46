"""Losses that have no recipe on a data set, and why."""

from dataclasses import dataclass

_DFN = ("dfn14m", "dfn192m", "dfn1b")
_ALL = ("coco", "cc3m", "cc12m", *_DFN, "laion400m")


@dataclass(frozen=True)
class Unpublished:
    """Why there are no settings to make a recipe of.

    Attributes:
        losses: names of losses.
        datasets: names of recipes.
        reason: what the sources have instead.
    """

    losses: tuple[str, ...]
    datasets: tuple[str, ...]
    reason: str


UNPUBLISHED = (
    Unpublished(("queueclip",), _ALL, "the loss is in none of the papers"),
    Unpublished(
        ("simclr",),
        _ALL,
        "it takes images alone, and the chapter, which reports SimCLR and SogCLR on ImageNet, gives no learning rate, weight "
        "decay or augmentation",
    ),
    Unpublished(
        ("cliplite",),
        tuple(name for name in _ALL if name != "coco"),
        "CLIP-Lite's paper trains on COCO Captions only",
    ),
    Unpublished(
        ("amorlip",),
        _DFN,
        "NeuCLIP's Table 2 has results of AmorLIP there, but no paper has its settings, and those of AmorLIP's own two scales "
        "differ (f_d, T_online, α, ρ's annealing)",
    ),
    Unpublished(
        ("tempnet",),
        ("cc3m",),
        "the released commands for CC3M start from pretrained encoders (a ResNet-50 and DistilBERT)",
    ),
    Unpublished(
        ("tempnet",),
        _DFN,
        "TempNet's distributed code trains on another part of DFN (12.0 M pairs; its CC12M command with 30 epochs)",
    ),
    Unpublished(
        ("sogclr", "isogclr", "fastclip-v0", "fastclip-v1", "fastclip-v2"),
        ("cc12m", *_DFN),
        "FastCLIP's released commands for it are for CC3M; AmorLIP's Table 1 has SogCLR on CC12M, without γ and temperature",
    ),
    Unpublished(
        (
            *("siglip", "sogclr", "isogclr", "fastclip-v0", "fastclip-v1", "fastclip-v2", "fastclip", "tempnet"),
            *("amorlip", "neuclip"),
        ),
        ("coco",),
        "of the papers at hand CLIP-Lite's alone trains on COCO Captions, with OpenCLIP's loss to compare",
    ),
    Unpublished(
        (
            *("openclip", "siglip", "sogclr", "isogclr", "fastclip-v0", "fastclip-v1", "fastclip-v2", "tempnet"),
            *("amorlip", "neuclip"),
        ),
        ("laion400m",),
        "the sources at hand have FastCLIP-v3's settings there, and no other loss's",
    ),
)


def reason_without(dataset: str, loss: str) -> str | None:
    """Why ``loss`` has no recipe on ``dataset``; None where nobody looked."""
    for entry in UNPUBLISHED:
        if loss in entry.losses and dataset in entry.datasets:
            return entry.reason
    return None
