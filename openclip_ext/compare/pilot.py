"""Perform the runs of a comparison: train, score by retrieval, and measure the errors of normalizers."""

import base64
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from openclip_ext.compare.decoded_data import Cache, PilotData
from openclip_ext.compare.plan import SEEDS
from openclip_ext.compare.runs import Run
from openclip_ext.compare.short_run import CURVE_POINTS, PilotRun
from openclip_ext.compare.space import BASELINE
from openclip_ext.contrastive.global_loss import GlobalContrastiveLoss
from openclip_ext.diagnostics import estimation_error
from openclip_ext.evaluation.encoder import Encoder
from openclip_ext.evaluation.ranks import Ranks, image_text_ranks, ranks_of_best_match
from openclip_ext.losses import registry
from openclip_ext.training.config import RunPlan
from openclip_ext.training.dry_run import peak_memory

RETRIEVAL, ZERO_SHOT = ("image_to_text_R@1", "text_to_image_R@1"), "zero_shot"
# Minimum size of the population for exact normalizers, in batches.
_BATCHES = 8


@dataclass(frozen=True)
class ComparePilot:
    """The runs of a comparison, as tasks for worker processes.

    Exact normalizers of ``anchors`` samples are computed over ``population`` training samples.
    """

    config: RunPlan
    data: PilotData
    population: int
    anchors: int

    @property
    def batch(self) -> int:
        return self.config.loading.batch_size * self.config.loading.accum_freq

    def run(self, run: Run, device: torch.device, seen: Callable[[Any], None]) -> dict[str, Any]:
        """Train and score a run; return its row of results.

        ``seen`` receives each step's number of samples, an integer, and after each scoring the row so far, a dictionary.
        ``row["points"]`` maps the number of training samples to the reciprocal ranks of the validation samples.
        :meth:`Comparison.stop` compares these ranks, and stops bad settings early.
        """
        start = time.perf_counter()
        training = PilotRun(self.config, self.data, run, device)
        points: dict[str, str] = {}

        def score(samples: int) -> float:
            reciprocal = reciprocal_ranks(ranks(training, self.data.val))
            points[str(samples)] = pack(reciprocal)
            so_far = {"id": run.id, **asdict(run), "samples": samples, "val": {"mean": float(reciprocal.mean())}}
            seen({**so_far, "points": dict(points), "all_seconds": time.perf_counter() - start})
            return recall(ranks(training, self.data.test))

        curve = training.train(seen, score)
        row = {
            "id": run.id,
            **asdict(run),
            "steps": training.steps,
            "seconds": training.seconds,
            "temperature": training.temperature(),
            "state_bytes": sum(training.loss.state_size()),
            "memory_bytes": peak_memory(device),
            "val": {"mean": float(reciprocal_ranks(ranks(training, self.data.val)).mean())},
            "curve": curve,
            "points": points,
            "hits": {name: pack(of.hits()) for name, of in ranks(training, self.data.test, self.data.names).items()},
        }
        # Measuring normalizers takes as long as a short run, so only runs with the second seed do it. Only the best setting of
        # each loss has such a run.
        normalizers = self.normalizer_errors(training) if run.seed == SEEDS[1] else None
        row |= {} if normalizers is None else {"normalizers": normalizers}
        return row | {"all_seconds": time.perf_counter() - start}

    def probe(self, run: Run, seconds: float, device: torch.device, seen: Callable[[Any], None]) -> dict[str, Any]:
        """Return the errors of a batch's normalizers before training, and the costs of a run in seconds.

        ``per_sample`` is the training time per sample, measured over ``seconds``. ``per_run`` is the rest of a run's time.
        """
        start = time.perf_counter()
        training = PilotRun(self.config, self.data, run, device)
        rest = time.perf_counter() - start
        found = self.normalizer_errors(training)
        if found is None:
            raise ValueError("the embeddings are not finite before the first step: check --pretrained and --precision")
        training.loss.train()
        first, now, step = 0.0, 0.0, 1
        for step in training.run_steps():
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            now = time.perf_counter()
            if step == 1:  # not measured, because the first step is slower
                first = now
            elif now - first > seconds:
                break
        per_sample = (now - first) / max(1, step - 1) / self.batch
        scoring = time.perf_counter()
        ranks(training, self.data.val)
        rest += 2 * (1 + CURVE_POINTS) * (time.perf_counter() - scoring)
        return found | {"per_sample": per_sample, "per_run": rest}

    def normalizer_errors(self, training: PilotRun) -> dict[str, Any] | None:
        """Return the errors of the loss's and the batch's log-normalizers, compared with exact values; None after divergence.

        The model and the loss stay in evaluation mode.
        """
        # The population must be larger than a batch, because a batch's normalizers are exact for a population of this batch.
        most = min(max(self.population, _BATCHES * self.batch), self.data.num_samples)
        samples = most // self.batch * self.batch
        training.model.eval()
        training.loss.eval()
        loading = replace(self.config.loading, seed=0, caption_hash=training.loss.needs_positives)
        loader = self.data.loader(loading, training.built.preprocess_val, training.texts, samples)
        parts = training.model, training.built.preprocess_val, training.texts, training.device
        found = Encoder(*parts, self.config.step.precision).embed(loader.iterate(0), samples)
        if not all(bool(side.isfinite().all()) for side in (found.image, found.text)):
            return None
        of_run = partial(estimation_error.measure, batch_size=self.batch, anchors=self.anchors, device=training.device)
        measure = partial(of_run, **vars(found))
        loss = training.loss
        is_global = isinstance(loss, GlobalContrastiveLoss) and not (loss.steers or loss.needs_positives)
        own = measure(loss) if is_global else None
        # Measure the batch's error at the loss's temperatures, which may differ between samples. If the loss's normalizers
        # include the positive pair, they are a different quantity, so the batch's error is measured with the baseline.
        comparable = own is not None and not loss.normalizers_include_positive
        of_batch = own if own is not None and comparable else measure(registry.create_loss(BASELINE))
        errors = {"batch": asdict(of_batch.minibatch), "samples": of_batch.samples}
        errors["temperature"] = training.temperature()
        if own is not None and own.estimator is not None:
            errors |= {"own": asdict(own.estimator), "own_batch": asdict(own.minibatch)}
        return errors


def ranks(training: PilotRun, samples: Cache, names: tuple[str, ...] = ()) -> dict[str, Ranks]:
    """Return the samples' ranks in retrieval in each direction, as in training's validation, and in zero-shot classification.

    Classification needs class ``names``.
    """
    captions, classes = samples.captions(), samples.classes()
    to_classify = [names] if names and classes is not None else []
    place = {caption: number for number, caption in enumerate(dict.fromkeys(captions))}
    image, text, *of_names = (of.cpu() for of in training.embed(samples, [*place], *to_classify))
    text = text[[place[caption] for caption in captions]]
    found = {f"{name}_R@1": of for name, of in image_text_ranks(image, text, samples.image_hashes(), captions).items()}
    for prompts in of_names:
        right = torch.stack([torch.arange(len(image)), torch.tensor(classes)], dim=1)
        found[ZERO_SHOT] = ranks_of_best_match(image, prompts, right)
    return found


def recall(found: Mapping[str, Ranks]) -> float:
    """Return R@1, averaged over both directions."""
    return float(sum(found[name].hits().mean() for name in RETRIEVAL) / 2)


def reciprocal_ranks(found: Mapping[str, Ranks]) -> Tensor:
    """Return reciprocal ranks ``(N,)``, averaged over both directions. They need fewer samples than R@1 to rank models."""
    return torch.stack([(1 + found[name].mean()).reciprocal() for name in RETRIEVAL]).mean(dim=0)


def pack(values: Tensor) -> str:
    """Encode values from 0 to 1 as text, with a precision of about three digits."""
    return base64.b64encode(values.half().numpy().tobytes()).decode()


def unpack(packed: str) -> Tensor:
    """Decode the text of :func:`pack` to ``(N,)`` float64."""
    return torch.frombuffer(bytearray(base64.b64decode(packed)), dtype=torch.float16).double()
