"""Check a training run before it is submitted: ``openclip-ext doctor --world-size 32 FLAGS``, with the flags of ``train``.

The program builds the run on the meta device, so it needs no GPU and trains nothing. It prints a line for each check, and a
fix for each problem. The exit status is 1 if a problem would stop the run. If the shards have no manifest, the program writes
one, as training does.
"""

import contextlib
import logging
import math
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import open_clip

from openclip_ext import compat, distributed
from openclip_ext.cli import command_line
from openclip_ext.cli.messages import echo
from openclip_ext.data.loader.build import build_source
from openclip_ext.data.reference import START
from openclip_ext.data.shards.shard_source import ShardSource
from openclip_ext.data.sources.source import BadDataError, BadSampleError, Source, decode_image
from openclip_ext.diagnostics.meta_run import add_machine_flags, build_on_meta, run_to_plan
from openclip_ext.diagnostics.plan import Plan
from openclip_ext.training.config import Config, RunPlan
from openclip_ext.training.runtime import run_folder

_GIB = 2**30
# Bytes per parameter in a checkpoint: the parameter and AdamW's two moments, all in float32.
_PARAMETER_BYTES = 12
# With adapters, a checkpoint has up to two float32 copies of a parameter: merged and unmerged.
_ADAPTED_PARAMETER_BYTES = 8
OK, WARNING, ERROR = "ok", "warning", "ERROR"
Finding = tuple[str, str]


class Doctor:
    """Checks of a training run, in the order in which a run would fail."""

    def __init__(self, config: Config, run: RunPlan, gpu_memory: float) -> None:
        self.config, self.run, self.gpu_memory = config, run, gpu_memory
        self.plan: Plan | None = None

    def findings(self) -> Iterator[Finding]:
        """Yield the findings of all checks. An error in a check becomes a finding, too."""
        for run_check in (self._versions, self._launcher, self._caches, self._data, self._build, self._folder):
            try:
                yield from run_check()
            except (ValueError, OSError, ImportError, BadDataError) as error:
                yield ERROR, str(error)

    def _versions(self) -> Iterator[Finding]:
        compat.check_version()
        yield OK, f"flags: --loss {self.run.loss.name}, --model {self.run.model.name}"
        yield OK, "versions: " + ", ".join(f"{name} {version}" for name, version in run_folder.versions().items())

    def _launcher(self) -> Iterator[Finding]:
        found = "its environment variables are set" if distributed.check_launcher() > 1 else "none found"
        yield OK, f"launcher: {found}; planned number of processes: {self.run.world_size}"

    def _caches(self) -> Iterator[Finding]:
        model = self.run.model
        settings = {} if model.is_folder else open_clip.get_model_config(model.file_name) or {}
        text = settings.get("text_cfg", {})
        weights = open_clip.get_pretrained_cfg(model.file_name, model.pretrained or "") or {}
        tokenizer = compat.tokenizer_name(model.name)
        needed = {text.get("hf_model_name"), os.path.dirname(weights.get("hf_hub", ""))}
        if model.name.startswith("hf-hub:"):
            needed.add(model.name.removeprefix("hf-hub:"))
        missing = [name for name in sorted(filter(None, needed)) if not _is_cached(name, model.cache_dir)]
        if tokenizer and not _is_cached(tokenizer, model.cache_dir, "tokenizer*"):
            missing.append(f"the tokenizer {tokenizer}")
        if missing:
            fix = f"run {compat.fetching_command(model.name, model.pretrained)} on a machine with a network"
            problem = f"caches: {', '.join(missing)} of the Hugging Face hub not found"
            yield WARNING, f"{problem}. If the nodes have no network, {fix}, and copy the cache"
        else:
            yield OK, "caches: the model needs no download from the Hugging Face hub"

    def _data(self) -> Iterator[Finding]:
        if self.run.data is None:
            yield OK, "data: the run has no training data and only evaluates"
            return
        source = build_source(self.run.data)
        try:
            caption = _first_caption(source)
        except BadSampleError as error:
            yield WARNING, f"data: the first sample is bad: {error}"
        else:
            matches = "the manifest matches, " if isinstance(source, ShardSource) else ""
            yield OK, f"data: {source.num_kept:,} samples, {matches}the first caption is {caption[:60]!r}"
        if source.known_bad()[0]:
            yield WARNING, "data: {:,} samples are bad: {}".format(*source.known_bad())
        if source.reference is not None:
            yield OK, f"reference: embeddings of {source.reference.about.get('model')} for these samples"

    def _build(self) -> Iterator[Finding]:
        """Build the run on the meta device. Warnings that the run would log become findings."""
        if self.run.data is None:
            return
        if self.run.model.name.startswith("hf-hub:") or self.run.data.reference == START:
            what = "--reference start" if self.run.data.reference == START else f"--model {self.run.model.name}"
            yield WARNING, f"model: not built and no memory estimated, because {what} needs the model's weights"
            return
        with _logged_warnings() as warnings:
            trainer = build_on_meta(self.config, self.run)
        yield OK, f"batch: {trainer.identity.global_batch:,} samples, {trainer.steps_per_epoch:,} steps per epoch"
        count = sum(parameter.numel() for group in trainer.step.optimizer.param_groups for parameter in group["params"])
        yield OK, f"model: {count / 1e6:,.1f} million parameters to train with --loss {self.run.loss.name}"
        for text in warnings:
            yield WARNING, text
        self.plan = Plan(self.run, trainer, self.gpu_memory)
        yield from self._memory(self.plan)

    def _memory(self, plan: Plan) -> Iterator[Finding]:
        run = self.run
        if run.data is not None and run.data.hard_negative_key is not None:
            yield WARNING, "memory: the estimate ignores hard negatives, which double the memory of the text tower"
        if run.world_size > 1 and not run.loss.options.get("local_loss", True):
            fix = "Set both, or the run needs more memory for the full similarity matrix"
            yield WARNING, f"memory: the estimate is for --local-loss --gather-with-grad. {fix}"
        if run.parallel.fsdp:
            text = "the estimate has all parameters on every GPU. With --fsdp, the run needs less memory"
            yield WARNING, f"memory: {text}"
        if warning := plan.warning(run.world_size, plan.asked):
            yield WARNING, f"memory: {warning}"
        else:
            need, available = plan.asked["sum"] / _GIB, self.gpu_memory / _GIB
            yield OK, f"memory: a GPU needs {need:.1f} GiB of its {available:.1f} GiB (details: openclip-ext plan)"

    def _folder(self) -> Iterator[Finding]:
        folder, saving = self.run.folder.folder, self.run.saving
        if folder is None:
            yield WARNING, "folder: the run saves nothing, because of --logs none"
            return
        if not self.run.folder.resume_latest and run_folder.has_begun(folder):
            yield ERROR, f"folder: {folder} contains a run: continue it with --resume latest, or use another --name"
        place = next(parent for parent in (folder, *folder.absolute().parents) if parent.is_dir())
        try:
            tempfile.TemporaryFile(dir=place).close()
        except OSError as error:
            yield ERROR, f"folder: cannot write to {place} ({error.strerror}): give another --logs"
            return
        if self.plan is not None:
            yield self._space(self.plan, place)
        if self.run.data is not None and not saving.every_steps:
            text = "checkpoints are saved only at the end of an epoch. To save more often, set --save-every-steps"
            yield WARNING, f"folder: {text}"

    def _space(self, plan: Plan, place: Path) -> Finding:
        """Compare the free disk space with the size of all checkpoints."""
        saving, free = self.run.saving, shutil.disk_usage(place).free
        earlier = math.ceil(self.run.length.epochs / saving.every_epochs) - 1 if saving.every_epochs else 0
        # When the last epoch is saved, there are still a checkpoint in mid-epoch, which SIGTERM saves, and two of
        # --save-most-recent: the old one and the new one. best.pt is smaller than a checkpoint.
        count = (min(1, earlier) if saving.delete_previous else earlier) + 2
        count += 2 * saving.most_recent + (saving.best_metric is not None)
        parameter_bytes = _PARAMETER_BYTES if self.run.model.lora.rank is None else _ADAPTED_PARAMETER_BYTES
        parameter_bytes += 4 if self.run.step.model_ema_decay is not None else 0
        size = parameter_bytes * plan.parameters + plan.of_sample * plan.samples
        space = f"folder: {place} has {free / _GIB:.1f} GiB free for {count} checkpoints of {size / _GIB:.2f} GiB"
        fix = "free space, use another --logs, increase --save-frequency, or set --delete-previous-checkpoint"
        return (OK, space) if free > count * size else (ERROR, f"{space}: {fix}")


def _first_caption(source: Source) -> str:
    """Read the first sample and return its caption. Raise BadSampleError if a part of the sample is missing or corrupt."""
    first = source.read_one(next(index for index in range(source.num_samples) if not source.is_left_out(index)))
    _, caption = source.decode(first, decode_image)
    if source.has_hard_negatives:
        source.hard_negative(first, 0)
    return caption


def _is_cached(repository: str, cache_dir: str | None, files: str = "*") -> bool:
    from huggingface_hub.constants import HF_HUB_CACHE

    folder = Path(cache_dir or HF_HUB_CACHE) / f"models--{repository.replace('/', '--')}"
    return any(folder.glob(f"snapshots/*/{files}"))


@contextlib.contextmanager
def _logged_warnings() -> Iterator[list[str]]:
    """Collect the warnings that are logged in the ``with`` block, instead of printing them."""
    found: list[str] = []
    handler, package = logging.Handler(logging.WARNING), logging.getLogger("openclip_ext")
    propagates = package.propagate
    handler.emit = lambda record: found.append(record.getMessage())  # type: ignore[method-assign]
    package.addHandler(handler)
    package.propagate = False
    try:
        yield found
    finally:
        package.removeHandler(handler)
        package.propagate = propagates


def main(argv: list[str]) -> None:
    """Print the findings, and exit with status 1 if a problem would stop the run, else 0."""
    usage = "openclip-ext doctor [FLAG] FLAGS OF TRAIN ..."
    parser = command_line.Parser(prog="openclip-ext doctor", allow_abbrev=False, usage=usage)
    add_machine_flags(parser)
    own, flags = parser.parse_known_args(argv)
    status = 0
    for verdict, text in Doctor(*run_to_plan(flags, own.world_size), own.gpu_memory).findings():
        echo(f"{verdict:8} {text}")
        status = status or int(verdict == ERROR)
    raise SystemExit(status)


if __name__ == "__main__":
    command_line.run(main)
