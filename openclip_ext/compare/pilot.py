"""Perform the runs of a comparison: train, and score by retrieval."""

import base64
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from openclip_ext.compare.decoded_data import Cache, PilotData
from openclip_ext.compare.runs import Run
from openclip_ext.compare.short_run import CURVE_POINTS, PilotRun
from openclip_ext.evaluation.ranks import Ranks, image_text_ranks, ranks_of_best_match
from openclip_ext.training.config import RunPlan
from openclip_ext.training.dry_run import peak_memory

RETRIEVAL, ZERO_SHOT = ("image_to_text_R@1", "text_to_image_R@1"), "zero_shot"


@dataclass(frozen=True)
class ComparePilot:
    """The runs of a comparison, as tasks for worker processes."""

    config: RunPlan
    data: PilotData

    @property
    def batch(self) -> int:
        return self.config.loading.batch_size * self.config.loading.accum_freq

    def run(self, run: Run, device: torch.device, seen: Callable[[int], None]) -> dict[str, Any]:
        """Train and score a run; return its row of results. ``seen`` receives each step's number of samples."""
        start = time.perf_counter()
        training = PilotRun(self.config, self.data, run, device)
        curve = training.train(seen, lambda samples: recall(ranks(training, self.data.test)))
        return {
            "id": run.id,
            **asdict(run),
            "steps": training.steps,
            "seconds": training.seconds,
            "temperature": training.temperature(),
            "state_bytes": sum(training.loss.state_size()),
            "memory_bytes": peak_memory(device),
            "val": {"mean": float(reciprocal_ranks(ranks(training, self.data.val)).mean())},
            "curve": curve,
            "hits": {name: pack(of.hits()) for name, of in ranks(training, self.data.test, self.data.names).items()},
            "all_seconds": time.perf_counter() - start,
        }

    def probe(self, run: Run, seconds: float, device: torch.device, seen: Callable[[int], None]) -> dict[str, float]:
        """Return the costs of a run in seconds, and R@1 ``before`` training.

        ``per_sample`` is the training time per sample, measured over ``seconds``. ``per_run`` is the rest of a run's time.
        """
        start = time.perf_counter()
        training = PilotRun(self.config, self.data, run, device)
        rest = time.perf_counter() - start
        before = recall(ranks(training, self.data.test))
        first, now, step = 0.0, 0.0, 1
        for step in training.run_steps():
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            now = time.perf_counter()
            if step == 1:  # not measured, because the first step is slower
                first = now
            elif now - first > seconds:
                break
        scoring = time.perf_counter()
        ranks(training, self.data.val)
        rest += (2 + CURVE_POINTS) * (time.perf_counter() - scoring)
        return {"per_sample": (now - first) / max(1, step - 1) / self.batch, "per_run": rest, "before": before}


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
