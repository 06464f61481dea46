"""Measure the time and memory of a training step on this machine, without writing or saving anything (``--dry-run``)."""

import itertools
import resource
import time
from collections.abc import Sequence
from typing import Any

import torch
from tqdm import tqdm

from openclip_ext import distributed
from openclip_ext.training.config import RunPlan
from openclip_ext.training.step import Batch
from openclip_ext.training.trainer import Trainer

_STEPS = 2
_WORDS = "word " * 1000  # more than the context of any text tower
_GIB = 2**30


def dry_run(plan: RunPlan, trainer: Trainer) -> str:
    """Take steps on the first batches, and return a text about their time and memory. Collective: all ranks call it.

    All captions have the full length of the text tower's context, because a batch with long captions may come at any time.
    """
    step, accum_freq = trainer.step, plan.length.accum_freq
    batches = trainer.loader.iterate(0)
    started = time.perf_counter()
    group = list(itertools.islice(batches, accum_freq))
    data_seconds = time.perf_counter() - started
    group = _with_longest_captions(plan, group)
    step.loss.start_epoch(0)
    for number in range(1 + _STEPS):
        if number == 1:  # the first step allocates memory, and compiles the model if that is asked for
            started = time.perf_counter()
        terms = step(group, number)
        float(sum(value.sum() for value in terms.values()))  # synchronizes with the device
    seconds = torch.tensor([(time.perf_counter() - started) / _STEPS, peak_memory(step.settings.device)])
    seconds, memory = distributed.all_reduce_max(seconds.to(step.settings.device)).tolist()
    samples = plan.loading.batch_size * accum_freq * distributed.world_size()
    total = trainer.steps_per_epoch * plan.length.epochs
    return (
        f"Dry run: a step of {samples:,} samples takes {seconds:.3g} s ({samples / seconds:,.0f} samples per second) with "
        f"captions of full length, and {memory / _GIB:.2f} GiB of {'GPU memory' if plan.device != 'cpu' else 'memory'} "
        f"per rank. The first batch arrived after {data_seconds:.3g} s. The {total:,} steps of the run take "
        f"{tqdm.format_interval(total * seconds)}, if the data keep pace. No run folder was written."
    )


def _with_longest_captions(plan: RunPlan, group: Sequence[Batch]) -> list[Batch]:
    longest = plan.model.tokenizer()([_WORDS])
    changed: list[Batch] = []
    for batch in group:
        texts: dict[str, Any] = {
            name: longest.expand(len(batch[name]), -1).contiguous()
            for name in ("text", "hard_negative")
            if name in batch
        }
        changed.append({name: value for name, value in batch.items() if name != "text_groups"} | texts)
    return changed


def peak_memory(device: torch.device) -> int:
    """Return the peak memory in bytes: allocated tensors on a GPU, or the process's resident memory on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
