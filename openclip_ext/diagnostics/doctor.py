"""Check a training run before it is submitted: ``openclip-ext doctor --world-size 32 FLAGS``, with the flags of ``train``.

The program needs no GPU and trains nothing. It prints a line for each check, and a fix for each problem. The exit status is 1
if a problem would stop the run. If the shards have no manifest, the program writes one, as training does.
"""

import math
import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import open_clip
import torch

from openclip_ext import compat, distributed
from openclip_ext.cli import command_line
from openclip_ext.cli.messages import say
from openclip_ext.contrastive.model import prepare_for
from openclip_ext.data.loader.rehearsal import build_loader
from openclip_ext.data.reference import START, EmbeddingStore
from openclip_ext.data.sources.source import BadDataError, BadSampleError, decode_image
from openclip_ext.diagnostics.dry_run import PRECISIONS
from openclip_ext.diagnostics.plan import Plan, Training, add_machine_flags, run_to_plan
from openclip_ext.model_configs import add_model_configs
from openclip_ext.training.checks import check, check_combination, doubtful_settings, other_batch
from openclip_ext.training.config import RunPlan
from openclip_ext.training.model import build_loss, build_model, loss_options
from openclip_ext.training.optimizer import create_optimizer, create_schedule
from openclip_ext.training.runtime import run_folder

_GIB = 2**30
# Bytes per parameter in a checkpoint: the parameter and AdamW's two moments, all in float32.
_PARAMETER_BYTES = 12
# With adapters, a checkpoint has up to two float32 copies of a parameter: merged and unmerged.
_ADAPTED_PARAMETER_BYTES = 8
# Maximum number of samples for which the check builds the loss's per-sample state.
_FEW_SAMPLES = 1000
OK, WARNING, ERROR = "ok", "warning", "ERROR"
Finding = tuple[str, str]


class Doctor:
    """Checks of a training run with ``world_size`` processes, in the order in which a run would fail."""

    def __init__(self, config: RunPlan, world_size: int, gpu_memory: float) -> None:
        self.config, self.world_size, self.gpu_memory = config, world_size, gpu_memory
        self.global_batch = config.loading.batch_size * config.loading.accum_freq * world_size
        self.samples: int | None = None
        self.steps: int | None = None  # steps per epoch
        self.reference: EmbeddingStore | None = None
        self.plan: Plan | None = None

    def findings(self) -> Iterator[Finding]:
        """Yield the findings of all checks. An error in a check becomes a finding, too."""
        checks = (self._versions, self._launcher, self._caches, self._data, self._build, self._memory, self._folder)
        for run_check in checks:
            try:
                yield from run_check()
            except (ValueError, OSError, ImportError, BadDataError) as error:
                yield ERROR, str(error)

    def _versions(self) -> Iterator[Finding]:
        compat.check_version()
        yield OK, f"flags: --loss {self.config.loss.name}, --model {self.config.model.name}"
        for text in doubtful_settings(self.config) if self.config.data is not None else ():
            yield WARNING, f"flags: {text}"
        yield OK, "versions: " + ", ".join(f"{name} {version}" for name, version in run_folder.versions().items())

    def _launcher(self) -> Iterator[Finding]:
        found = "its environment variables are set" if distributed.check_launcher() > 1 else "none found"
        yield OK, f"launcher: {found}; {self.world_size} processes planned"

    def _caches(self) -> Iterator[Finding]:
        model = self.config.model
        settings = {} if ":" in model.name else open_clip.get_model_config(model.file_name) or {}
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
        spec = self.config.data
        if spec is None:
            yield OK, "data: the run has no training data and only evaluates"
            return
        loading = replace(self.config.loading, rank=0, world_size=self.world_size, workers=0)
        keep = self.config.keep
        loader = build_loader(spec, loading, keep, preprocess=torch.as_tensor, tokenizer=torch.as_tensor)
        source = loader.source
        self.reference = source.reference
        self.steps = loader.batches_per_epoch // loading.accum_freq
        self.samples = loader.num_samples  # --train-num-samples shortens epochs, but not the loss's tables
        try:
            first = source.read_one(next(index for index in range(source.num_samples) if not source.is_left_out(index)))
            _, caption = source.decode(first, decode_image)
            if source.has_hard_negatives:
                source.hard_negative(first, 0)
        except BadSampleError as error:
            yield WARNING, f"data: the first sample is bad: {error}"
        else:
            yield (
                OK,
                f"data: {source.num_kept:,} samples, the manifest matches, the first caption is {caption[:60]!r}",
            )
        if source.known_bad()[0]:
            yield WARNING, "data: {:,} samples are bad: {}".format(*source.known_bad())
        if self.reference is not None:
            yield OK, f"reference: embeddings of {self.reference.about.get('model')} for these samples"
        yield OK, f"batch: {self.global_batch:,} samples, {self.steps:,} steps per epoch"
        if (mismatch := other_batch(self.config, self.global_batch, self.world_size)) is not None:
            yield WARNING, f"batch: {mismatch}"

    def _build(self) -> Iterator[Finding]:
        """Build model, loss and optimizer like a run, but on the meta device, where tensors need no memory."""
        if self.steps is None or ":" in self.config.model.name:
            return
        if self.config.data is not None and self.config.data.reference == START:
            yield (
                WARNING,
                "model: not built here, because --reference start needs the embeddings that the run writes first",
            )
            return
        meta, steps = torch.device("meta"), self.steps * self.config.length.epochs
        pretrained = bool(self.config.model.pretrained)
        config = self.config
        options = loss_options(config.loss, steps, pretrained, self.reference)
        with command_line.without_warnings():
            built = build_model(replace(config.model, pretrained=None), meta, config.loading.seed)
            few = min(self.samples or 1, _FEW_SAMPLES)
            loss = build_loss(config.loss, config.model.name, built.model, few, meta, self.reference, options)
        check_combination(config, loss, self.world_size, compat.is_captioner(built.model))
        prepare_for(loss, built.model)
        optimizer = create_optimizer(built.model, config.optimizer, loss.logit_scale_lr, loss.model_head())
        create_schedule(config.schedule, optimizer, self.steps, loss.logit_scale_lr)
        count = sum(parameter.numel() for group in optimizer.param_groups for parameter in group["params"])
        yield OK, f"model: {count / 1e6:,.1f} million parameters to train with --loss {config.loss.name}"

    def _memory(self) -> Iterator[Finding]:
        model, step = self.config.model, self.config.step
        if self.samples is None or self.samples < self.global_batch:
            return
        if ":" in model.name or step.precision not in PRECISIONS:
            yield WARNING, "memory: openclip-ext plan does not support this --model or --precision"
            return
        if self.config.data is not None and self.config.data.hard_negative_key is not None:
            yield WARNING, "memory: the estimate ignores hard negatives, which double the memory of the text tower"
        if model.lora.rank is not None:
            yield WARNING, "memory: the estimate trains all weights. With --lora-rank, the run needs less memory"
        if self.world_size > 1 and not self.config.loss.options.get("local_loss", True):
            fix = "Set both, or the run needs more memory for the full similarity matrix"
            yield WARNING, f"memory: the estimate is for --local-loss --gather-with-grad. {fix}"
        if self.config.parallel.fsdp:
            yield (
                WARNING,
                "memory: the estimate has all parameters on every GPU. With --fsdp, the run needs less memory",
            )
        training = Training.of(self.config, self.samples, self.world_size, self.reference)
        self.plan = Plan(training, self.world_size, self.gpu_memory)
        if warning := self.plan.warning(self.plan.asked):
            yield WARNING, f"memory: {warning}"
        else:
            need, available = self.plan.asked.gpu / _GIB, self.gpu_memory / _GIB
            yield OK, f"memory: a GPU needs {need:.1f} GiB of its {available:.1f} GiB (details: openclip-ext plan)"

    def _folder(self) -> Iterator[Finding]:
        folder, saving, length = self.config.folder.folder, self.config.saving, self.config.length
        if folder is None:
            yield WARNING, "folder: the run saves nothing, because of --logs none"
            return
        if not self.config.folder.resume_latest and run_folder.has_begun(folder):
            yield ERROR, f"folder: {folder} contains a run: continue it with --resume latest, or use another --name"
        place = next(parent for parent in (folder, *folder.absolute().parents) if parent.is_dir())
        try:
            tempfile.TemporaryFile(dir=place).close()
        except OSError as error:
            yield ERROR, f"folder: cannot write to {place} ({error.strerror}): give another --logs"
            return
        free = shutil.disk_usage(place).free
        if self.plan is None or self.samples is None:
            return
        earlier = math.ceil(length.epochs / saving.every_epochs) - 1 if saving.every_epochs else 0
        # When the last epoch is saved, there are still a checkpoint in mid-epoch, which SIGTERM saves, and two of
        # --save-most-recent: the old one and the new one. best.pt is smaller than a checkpoint.
        count = (min(1, earlier) if saving.delete_previous else earlier) + 2
        count += 2 * saving.most_recent + (saving.best_metric is not None)
        parameter_bytes = _PARAMETER_BYTES if self.config.model.lora.rank is None else _ADAPTED_PARAMETER_BYTES
        parameter_bytes += 4 if self.config.step.model_ema_decay is not None else 0
        size = parameter_bytes * self.plan.parameters + self.plan.of_sample * self.samples
        space = f"folder: {place} has {free / _GIB:.1f} GiB free for {count} checkpoints of {size / _GIB:.2f} GiB"
        fix = "free space, use another --logs, increase --save-frequency, or set --delete-previous-checkpoint"
        yield (OK, space) if free > count * size else (ERROR, f"{space}: {fix}")
        if self.config.data is not None and not saving.every_steps:
            yield (
                WARNING,
                "folder: checkpoints are saved only at the end of an epoch. To save more often, set --save-every-steps",
            )


def _is_cached(repository: str, cache_dir: str | None, files: str = "*") -> bool:
    from huggingface_hub.constants import HF_HUB_CACHE

    folder = Path(cache_dir or HF_HUB_CACHE) / f"models--{repository.replace('/', '--')}"
    return any(folder.glob(f"snapshots/*/{files}"))


def main(argv: list[str]) -> None:
    """Print the findings, and exit with status 1 if a problem would stop the run, else 0."""
    usage = "openclip-ext doctor [FLAG] FLAGS OF TRAIN ..."
    parser = command_line.Parser(prog="openclip-ext doctor", allow_abbrev=False, usage=usage)
    add_machine_flags(parser)
    own, flags = parser.parse_known_args(argv)
    add_model_configs()
    config = run_to_plan(flags, own.world_size)
    check(config)
    status = 0
    for verdict, text in Doctor(config, own.world_size, own.gpu_memory).findings():
        say(f"{verdict:8} {text}")
        status = status or int(verdict == ERROR)
    raise SystemExit(status)


if __name__ == "__main__":
    command_line.run(main)
