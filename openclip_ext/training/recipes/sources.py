"""What the recipes of several data sets share: a source's common settings, and how its tables read."""

from collections.abc import Mapping
from dataclasses import dataclass

from openclip_ext.training.recipes.schema import Recipe, Result, Value

# A value, or a mean with its standard deviation.
Score = float | tuple[float, float]
Options = dict[str, Value]

FAST_CLIP = "github.com/Optimization-AI/fast_clip"
DRRHO_CLIP = "github.com/Optimization-AI/DRRho-CLIP"
AMORLIP_CODE = "github.com/haotiansun14/AmorLIP"
DIST_TEMPNET = "github.com/Optimization-AI/DistTempNet"
CLIP_LITE_CODE = "github.com/4m4n5/CLIP-Lite"

# NeuCLIP, Table 4 and Section 5.
NPN: Options = {"prototypes": 4096, "restart_every": 500, "normalizer_updates": 10, "normalizer_lr": 1.0}
NPN_NOTE = "ε, the temperature's start and Adam's β are not given: the loss's and OpenCLIP's defaults"
SIGLIP_NOTE = "learning rate, weight decay and warm-up are those the table gives for the data set, not SigLIP's own"
# OpenCLIP's loss with memory that does not grow with the square of the global batch.
OPENCLIP_DISTRIBUTED: Options = {"local-loss": True, "gather-with-grad": True}

# AmorLIP, Section 4 and Appendix C: what medium and large scale share.
AMORLIP: Options = {
    "normalizer_objective": "l2-log",
    "normalizer_lr": 1e-3,
    "normalizer_updates": 3,
    "target_every": 2,
    "previous_weight": 0.8,
}


@dataclass(frozen=True)
class Setting:
    """One data set as one source trains on it; the attributes are those of ``Recipe``."""

    dataset: str
    openclip_flags: Mapping[str, Value]
    dataset_size: int
    samples_seen: int
    gpus: int = 8

    def recipe(
        self,
        loss: str,
        loss_options: Mapping[str, Value],
        source: str,
        results: tuple[Result, ...] = (),
        notes: tuple[str, ...] = (),
        extra_flags: Mapping[str, Value] | None = None,
    ) -> Recipe:
        """The recipe of ``loss`` in this setting."""
        return Recipe(
            dataset=self.dataset,
            loss=loss,
            openclip_flags={**self.openclip_flags, **(extra_flags or {})},
            loss_options=loss_options,
            gpus=self.gpus,
            dataset_size=self.dataset_size,
            samples_seen=self.samples_seen,
            source=source,
            results=results,
            notes=notes,
        )


def datacomp(source: str, average: Score, imagenet: Score, retrieval: Score) -> tuple[Result, ...]:
    """The three columns in which NeuCLIP and AmorLIP report the DataComp benchmark."""
    columns = {"DataComp average": average, "ImageNet & variants": imagenet, "Retrieval": retrieval}
    results = []
    for metric, score in columns.items():
        value, spread = score if isinstance(score, tuple) else (score, None)
        results.append(Result(metric, value, source, spread))
    return tuple(results)
