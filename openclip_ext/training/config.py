"""The configuration of a training: one frozen tree, made of the command line's flags. Nothing here imports torch.

A field is a flag (``openclip_ext/cli/options.py``): its default, help and range are said here once. No part of a training sees
another part's flags.
"""

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from openclip_ext import compat
from openclip_ext.cli.errors import UsageError
from openclip_ext.cli.messages import without_secrets
from openclip_ext.cli.options import flag, from_flags
from openclip_ext.data.loader.config import TrainLoaderConfig
from openclip_ext.data.sources.spec import DataSpec

if TYPE_CHECKING:
    import torch

_DESTINATIONS = frozenset({"wandb", "tensorboard"})
# Fields of ModelConfig that ``open_clip.create_model_and_transforms`` takes under these names.
_FACTORY_OPTIONS = (
    *("pretrained", "pretrained_image", "precision", "cache_dir"),
    *("force_quick_gelu", "force_custom_text", "force_patch_dropout", "force_image_size", "force_context_length"),
    *("image_mean", "image_std", "image_interpolation", "image_resize_mode"),
)


@dataclass(frozen=True)
class LoraConfig:
    """Low-rank adapters, which are trained instead of the weights."""

    rank: int | None = flag(
        None,
        "train adapters of this rank in the attention and MLP layers (LoRA, such as 16), and freeze all other weights",
        dest="lora_rank",
        minimum=1,
    )
    alpha: float | None = flag(
        None,
        "the adapters' scale times their rank (default: twice the rank, so that another rank needs no other --lr)",
        dest="lora_alpha",
        needs="lora_rank",
        exclusive_minimum=0.0,
    )
    targets: str = flag(
        "both",
        "the towers that get adapters; the other one is frozen",
        dest="lora_targets",
        needs="lora_rank",
        choices=("image", "text", "both"),
    )

    @property
    def scale_numerator(self) -> float:
        """``alpha`` or its default."""
        return 2.0 * (self.rank or 0) if self.alpha is None else self.alpha


@dataclass(frozen=True)
class ModelConfig:
    """OpenCLIP's flags that say how the model is built; the names are those of ``open_clip``'s factory.

    Attributes:
        pretrained: tag or file of weights to start from, or empty.
        siglip_start: start values of ``logit_scale`` and ``logit_bias`` for SigLIP.
        trace: ``torch.jit.trace`` with this batch size, for evaluation only; None: do not.
        lora: adapters of the model; without a rank it has none.
        lock_image, lock_text: freeze a tower, but for ``unlocked`` layer groups, counted from the output; its BatchNorm
            statistics or LayerNorm parameters only where the flag says so.
    """

    name: str = flag(dest="model")
    aug_cfg: Mapping[str, Any] = flag()
    pretrained: str | None = flag(None)
    pretrained_image: bool = flag(False)
    precision: str = flag("fp32")
    torchscript: bool = flag(False)
    force_quick_gelu: bool = flag(False)
    force_custom_text: bool = flag(False)
    force_patch_dropout: float | None = flag(None, minimum=0.0, exclusive_maximum=1.0)
    force_image_size: int | tuple[int, ...] | None = flag(None)
    force_context_length: int | None = flag(None, minimum=1)
    image_mean: Sequence[float] | None = flag(None)
    image_std: Sequence[float] | None = flag(None)
    image_interpolation: str | None = flag(None)
    image_resize_mode: str | None = flag(None)
    image_backend: str = flag(
        "pil",
        "what decodes, crops and resizes training images; pil: OpenCLIP's pixels, bit for bit; torchvision: in a third of "
        "the time, pixels differ by a rounding",
        choices=("pil", "torchvision"),
        needs="train_data",
    )
    cache_dir: str | None = flag(None)
    siglip_start: bool = flag(False, dest="siglip")
    lock_image: bool = flag(False)
    lock_image_unlocked_groups: int = flag(0, needs="lock_image", minimum=0)
    lock_image_freeze_bn_stats: bool = flag(False, needs="lock_image")
    lock_text: bool = flag(False)
    lock_text_unlocked_layers: int = flag(0, needs="lock_text", minimum=0)
    lock_text_freeze_layer_norm: bool = flag(False, needs="lock_text")
    grad_checkpointing: bool = flag(False)
    trace: int | None = None
    lora: LoraConfig = LoraConfig()

    @property
    def file_name(self) -> str:
        """Name of the configuration: ``ViT-B-32`` also for ``ViT-B/32``, and ``m`` for ``local-dir:models/m``."""
        if not self.is_folder:
            return self.name.replace("/", "-")
        return re.sub(r"[^\w.-]", "-", os.path.basename(os.path.abspath(self.name.partition(":")[2])))

    @property
    def is_folder(self) -> bool:
        """Whether the model is a folder with configuration and weights, ``local-dir:`` or ``hf-hub:``."""
        return ":" in self.name

    @property
    def weights(self) -> str | None:
        """Tag or file of the weights that the model starts from; None: it is untrained."""
        return self.pretrained or compat.hub_weights(self.name, self.cache_dir)

    def create(self, device: "torch.device") -> tuple[Any, Callable, Callable]:
        """Return the bare model, the training transform and the evaluation transform."""
        options = {name: getattr(self, name) for name in _FACTORY_OPTIONS}
        return compat.create_model(
            self.name,
            device,
            siglip_start=self.siglip_start,
            jit=self.torchscript,
            aug_cfg=dict(self.aug_cfg),
            **options,
        )

    def tokenizer(self) -> Callable:
        """Return the model's tokenizer."""
        import open_clip

        return open_clip.get_tokenizer(self.name, cache_dir=self.cache_dir, context_length=self.force_context_length)


@dataclass(frozen=True)
class LossConfig:
    """The loss and its options.

    Attributes:
        name: ``--loss``.
        given: the options that the user or the recipe gave, whose values beat those of a pretrained model.
        options: all options of the loss; empty until :func:`openclip_ext.training.model.with_loss_options` has added them.
        without_effect: flags that the user gave for other losses.
    """

    name: str
    given: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    without_effect: tuple[str, ...] = ()

    @property
    def has_parts(self) -> bool:
        """Whether the user asked for a part by name, or gave a reference model."""
        return self.has_reference or any(self.given.get(part) for part in ("normalizer", "temperature_scheme"))

    @property
    def has_reference(self) -> bool:
        """Whether the loss gets a reference model's embeddings."""
        return "steer" in self.given


def _tower_lr(tower: str) -> Any:
    text, hint = (
        f"learning rate of the {tower} tower (default: --lr)",
        f"to train no part of this tower use --lock-{tower}",
    )
    return flag(None, text, exclusive_minimum=0.0, hint=hint)


def _layer_decay(tower: str) -> Any:
    text = f"learning rate of each layer of the {tower} tower over that of the next one; its head has the full rate"
    return flag(1.0, text, exclusive_minimum=0.0, maximum=1.0)


@dataclass(frozen=True)
class OptimizerConfig:
    """The optimizer and its settings.

    Attributes:
        name: ``adamw``, ``lamb`` (timm's), or ``timm/NAME``.
        weight_decay: of the parameters with more than one dimension.
        beta1, beta2: Adam's; None: a timm optimizer's own.
        eps: Adam's ε; None: a timm optimizer's own.
        momentum: of a timm optimizer; None: its own.
    """

    name: str = flag("adamw", dest="opt")
    lr: float = flag(5e-4, exclusive_minimum=0.0, hint="to evaluate only, leave out --train-data")
    weight_decay: float = flag(0.2, dest="wd", minimum=0.0)
    beta1: float | None = flag(0.9, minimum=0.0, exclusive_maximum=1.0)
    beta2: float | None = flag(0.98, minimum=0.0, exclusive_maximum=1.0)
    eps: float | None = flag(1e-6, exclusive_minimum=0.0)
    momentum: float | None = flag(None, minimum=0.0, exclusive_maximum=1.0)
    lookahead_steps: int | None = flag(
        None,
        "steps between two of LookAhead, for --opt timm/lookahead_NAME (CLIP-Lite: 5; default: timm's 6)",
        minimum=1,
    )
    lr_image: float | None = _tower_lr("image")
    image_layer_decay: float = _layer_decay("image")
    lr_text: float | None = _tower_lr("text")
    text_layer_decay: float = _layer_decay("text")

    def tower_rates(self) -> dict[str, tuple[float, float]]:
        """Return, for each tower with rates of its own, its learning rate over the run's and its layer decay."""
        towers = {"image": (self.lr_image, self.image_layer_decay), "text": (self.lr_text, self.text_layer_decay)}
        return {
            tower: (1.0 if lr is None else lr / self.lr, decay)
            for tower, (lr, decay) in towers.items()
            if lr is not None or decay != 1
        }


@dataclass(frozen=True)
class ScheduleConfig:
    """The learning rate over the run.

    Attributes:
        lr: after the warm-up.
        warmup: optimizer steps of linear warm-up.
        lr_min: where the cosine ends.
        cooldown_epochs, cooldown_power, cooldown_end: the end of ``const-cooldown``.
        skip: leave the optimizer's rates alone.
    """

    name: str = flag("cosine", dest="lr_scheduler", choices=("cosine", "const", "const-cooldown"))
    lr: float = flag(5e-4)
    epochs: int = flag(32)
    warmup: int = flag(10_000, minimum=0)
    lr_min: float = flag(
        0.0, "learning rate at the end of --lr-scheduler cosine (FastCLIP on LAION-400M: 4e-5)", minimum=0.0
    )
    cooldown_epochs: int | None = flag(None, dest="epochs_cooldown", minimum=0)
    cooldown_power: float = flag(1.0, dest="lr_cooldown_power", minimum=0.0)
    cooldown_end: float = flag(0.0, dest="lr_cooldown_end", minimum=0.0)
    skip: bool = flag(False, dest="skip_scheduler")


@dataclass(frozen=True)
class ParallelConfig:
    """How the model is distributed over the processes, and whether it is compiled.

    Attributes:
        static_graph: DistributedDataParallel's.
        sync_batchnorm: whether BatchNorm's statistics are those of all processes.
        compile: whether to use ``torch.compile``.
        grad_checkpointing: whether the model recomputes activations.
    """

    fsdp: bool = flag(
        False,
        "spread parameters, gradients and optimizer state over the processes (FSDP2) instead of replicating them (DDP)",
    )
    keep_gathered: bool = flag(
        False,
        "with --fsdp: keep the gathered parameters from forward to backward; less communication, more memory",
        dest="fsdp_no_reshard_after_forward",
        needs="fsdp",
    )
    static_graph: bool = flag(False, dest="ddp_static_graph")
    sync_batchnorm: bool = flag(False, dest="use_bn_sync")
    compile: bool = flag(False, dest="torchcompile")
    grad_checkpointing: bool = flag(False)


@dataclass(frozen=True)
class StepConfig:
    """The flags of a step; ``precision`` is OpenCLIP's name of the types."""

    precision: str = flag("fp32")
    grad_clip_norm: float | None = flag(None, exclusive_minimum=0.0)
    model_ema_decay: float | None = flag(
        None,
        "keep an average of the weights, such as 0.9999: it is evaluated, and what a checkpoint gives to others",
        exclusive_minimum=0.0,
        exclusive_maximum=1.0,
        hint="give one such as 0.9999",
    )


@dataclass(frozen=True)
class RunLength:
    """How long the run is."""

    epochs: int = flag(minimum=1, hint="to evaluate only, leave out --train-data")
    accum_freq: int = flag(1)
    log_every: int = flag(100, dest="log_every_n_steps", minimum=1)
    max_skipped_steps: int = flag(
        50,
        "stop after so many steps in a row whose gradients are not finite; such a step changes nothing",
        minimum=1,
    )
    profile: int = flag(
        0,
        "trace so many optimizer steps, after the first 12 of this start: profile/ in the run folder gets a trace and a table "
        "of where the time goes",
        minimum=0,
    )


@dataclass(frozen=True)
class SavePolicy:
    """When checkpoints are written and which ones stay.

    Attributes:
        folder: the run's ``checkpoints/``, or None to save nothing.
        every_epochs: epochs between two checkpoints; the last epoch is always saved.
        most_recent: also keep ``epoch_latest.pt``.
        delete_previous: keep only the newest whole epoch.
    """

    folder: Path | None
    name: str
    every_epochs: int = flag(1, dest="save_frequency", minimum=0)
    every_steps: int = flag(
        0, "also save a checkpoint every N optimizer steps (0: never)", dest="save_every_steps", minimum=0
    )
    most_recent: bool = flag(False, dest="save_most_recent")
    delete_previous: bool = flag(False, dest="delete_previous_checkpoint")
    best_metric: str | None = flag(
        None,
        "keep the model with the best value of a metric of results.jsonl as best.pt (of losses and ranks: the least)",
        dest="keep_best",
    )


@dataclass(frozen=True)
class EvaluationConfig:
    """What is measured during training; each kind every so many epochs (0: never) and after the last one."""

    val_data: DataSpec | None = None
    val_every: int = flag(1, dest="val_frequency", minimum=0)
    imagenet_val: str | None = flag(None)
    imagenet_v2: str | None = flag(None)
    imagenet_every: int = flag(2, dest="zeroshot_frequency", minimum=0)
    suite: str | None = flag(
        None,
        "DataComp tasks to run during training",
        dest="eval_suite",
        needs="eval_data_dir",
        choices=("quick", "full"),
    )
    suite_data: str | None = flag(
        None, "folder with the evaluation data sets", dest="eval_data_dir", needs="eval_suite"
    )
    suite_every: int = flag(1, "run the suite every N epochs and at the end", dest="eval_frequency")
    batch_size: int = flag(64)
    workers: int = flag(0)

    @property
    def is_asked_for(self) -> bool:
        """Whether there is anything to measure."""
        return any(asked is not None for asked in (self.val_data, self.imagenet_val, self.imagenet_v2, self.suite))

    @property
    def is_wanted(self) -> bool:
        """Whether anything is to be measured during training."""
        imagenet = self.imagenet_val or self.imagenet_v2
        kinds = ((self.val_data, self.val_every), (imagenet, self.imagenet_every), (self.suite, self.suite_every))
        return any(asked is not None and every > 0 for asked, every in kinds)


@dataclass(frozen=True)
class RunFolderConfig:
    """Where the run's files go and what is logged.

    Attributes:
        logs: ``--logs``; None to write nothing.
        resume_latest: the folder may hold a run, which goes on.
        log_local_rank: with ``--log-local``, this process's rank on its node, where the first one logs; None: the master logs.
        rank: of this process.
        remote_sync: place that the folder is copied to, with a folder for each run; None: nowhere.
        remote_every: seconds between two copies.
        remote_protocol: ``s3`` or ``fsspec``.
    """

    logs: Path | None
    name: str
    resume_latest: bool = False
    log_local_rank: int | None = None
    rank: int = 0
    debug: bool = flag(False)
    remote_sync: str | None = flag(None)
    remote_every: int = flag(300, dest="remote_sync_frequency")
    remote_protocol: str = flag("s3", dest="remote_sync_protocol")

    @property
    def remote(self) -> str | None:
        """The place of this run's copy."""
        return None if self.remote_sync is None else f"{self.remote_sync.rstrip('/')}/{self.name}"

    @property
    def folder(self) -> Path | None:
        """``LOGS/NAME``, or None."""
        return None if self.logs is None else self.logs / self.name

    def openclip_paths(self, tensorboard: bool) -> dict[str, str | None]:
        """Return the paths that OpenCLIP's own ``params.txt`` has."""
        folder = self.folder
        if folder is None:
            return {"log_path": None, "checkpoint_path": None, "tensorboard_path": ""}
        return {
            "log_path": str(folder / self.log_file),
            "checkpoint_path": str(folder / "checkpoints"),
            "tensorboard_path": str(folder / "tensorboard") if tensorboard else "",
        }

    @property
    def log_file(self) -> str:
        """``out.log``, or with ``--log-local`` one for each node."""
        return "out.log" if self.log_local_rank is None else f"out-{self.rank}"


@dataclass(frozen=True)
class ReportingConfig:
    """Where numbers go beside the log and ``metrics.jsonl``.

    Attributes:
        destinations: of ``wandb`` and ``tensorboard``.
        warmup: optimizer steps until the learning rate is there.
        resumes: let W&B continue the run of this name.
    """

    destinations: frozenset[str] = frozenset()
    epochs: int = flag(1)
    warmup: int = flag(0)
    name: str = ""
    wandb_project: str = flag("open-clip", dest="wandb_project_name")
    wandb_notes: str = flag("")
    resumes: bool = False


@dataclass(frozen=True)
class TrainingConfig:
    """A run, part by part.

    Attributes:
        data: what to train on; None: only evaluate.
        flags: all flags by their Python names, as they were parsed.
        device: ``--device``; None: not given, OpenCLIP's default is ``cuda``.
        resume: a checkpoint's path, ``latest`` or None.
        copy_codebase: keep the source with the run.
    """

    model: ModelConfig
    data: DataSpec | None
    loading: TrainLoaderConfig
    loss: LossConfig
    optimizer: OptimizerConfig
    schedule: ScheduleConfig
    step: StepConfig
    parallel: ParallelConfig
    length: RunLength
    saving: SavePolicy
    evaluation: EvaluationConfig
    folder: RunFolderConfig
    reporting: ReportingConfig
    flags: Mapping[str, Any]
    device: str | None = flag(None)
    rank_patience: float | None = flag(
        600.0,
        "end the run when a rank has given no sign of life for so many seconds, and say which; none: wait for ever",
        exclusive_minimum=0.0,
    )
    shared_batch: int | None = flag(
        None,
        "samples of an optimizer step over all GPUs, however many; --batch-size is then the most that a GPU takes at once, "
        "and --accum-freq follows",
        dest="global_batch",
        minimum=1,
    )
    resume: str | None = flag(None)
    copy_codebase: bool = flag(False)

    @cached_property
    def stored_flags(self) -> dict[str, Any]:
        """All flags as the run folder stores them: without secrets, and with OpenCLIP's names of the folder's files."""
        derived = {"name": self.folder.name, **self.folder.openclip_paths("tensorboard" in self.reporting.destinations)}
        return without_secrets({**self.flags, **derived, "aug_cfg": dict(self.flags["aug_cfg"])})


# The configurations that flags fill, by the heading of their flags in the help.
FLAG_GROUPS: dict[str, tuple[type, ...]] = {
    "data": (DataSpec, TrainLoaderConfig, ModelConfig),
    "optimization": (OptimizerConfig, ScheduleConfig, StepConfig, ParallelConfig, LoraConfig),
    "length, checkpoints and evaluation": (RunLength, SavePolicy, EvaluationConfig),
    "the run": (RunFolderConfig, ReportingConfig, TrainingConfig),
}


def training_config(flags: Mapping[str, Any], loss: LossConfig) -> TrainingConfig:
    """Return the configuration that flags, by their Python names, ask for.

    Flags that OpenCLIP sets where processes know of each other, such as ``rank`` and ``world_size``, may be missing.
    """
    folder = from_flags(
        RunFolderConfig,
        flags,
        logs=None if writes_nothing(flags["logs"]) else Path(flags["logs"]),
        name=flags["name"] or "",
        resume_latest=flags["resume"] == "latest",
        log_local_rank=flags.get("local_rank", 0) if flags["log_local"] else None,
        rank=flags.get("rank", 0),
    )
    is_given = flags["train_data"] or flags["dataset_type"] == "synthetic"
    configs: dict[str, Any] = {
        "model": model_config(flags),
        "data": from_flags(DataSpec, flags) if is_given else None,
        "loading": from_flags(TrainLoaderConfig, flags, patience=flags["rank_patience"]),
        "optimizer": from_flags(OptimizerConfig, flags),
        "schedule": from_flags(ScheduleConfig, flags),
        "step": from_flags(StepConfig, flags),
        "parallel": from_flags(ParallelConfig, flags),
        "length": from_flags(RunLength, flags),
        "saving": from_flags(
            SavePolicy, flags, folder=folder.folder and folder.folder / "checkpoints", name=folder.name
        ),
        "evaluation": from_flags(
            EvaluationConfig, flags, val_data=DataSpec.of_validation(flags) if flags["val_data"] else None
        ),
        "folder": folder,
        "reporting": from_flags(
            ReportingConfig,
            flags,
            destinations=_destinations(flags["report_to"]),
            name=folder.name,
            resumes=flags["resume"] is not None,
        ),
    }
    return from_flags(TrainingConfig, flags, **configs, loss=loss, flags=dict(flags))


def for_processes(config: TrainingConfig, date: str, **flags: Any) -> TrainingConfig:
    """Return the configuration of one of several processes that know of each other.

    Args:
        config: as parsed.
        date: of the start, the same on all of them, for the name of a run without one.
        flags: what OpenCLIP sets where it starts ``torch.distributed``: ``rank``, ``local_rank``, ``world_size``, ...
    """
    flags = {**config.flags, **flags}
    flags |= shared_batch(config, flags["world_size"])
    if flags["name"] is None:
        model = flags["model"].replace("/", "-")
        told = f"lr_{flags['lr']}-b_{flags['batch_size']}-j_{flags['workers']}-p_{flags['precision']}"
        flags["name"] = f"{date}-model_{model}-{told}"
    return training_config(flags, config.loss)


def shared_batch(config: TrainingConfig, world_size: int) -> dict[str, int]:
    """Return ``batch_size`` and ``accum_freq`` with the fewest micro-batches that make the ``--global-batch``, if given."""
    total, loading = config.shared_batch, config.loading
    if total is None:
        return {}
    for accum_freq in range(loading.accum_freq, total + 1):
        size, rest = divmod(total, accum_freq * world_size)
        if rest == 0 and size <= loading.batch_size:
            return {"batch_size": size, "accum_freq": accum_freq}
    raise UsageError(
        f"--global-batch {total} cannot be shared by {world_size} processes: give a number that every number of processes "
        "divides with which the run may go on"
    )


def model_config(flags: Mapping[str, Any]) -> ModelConfig:
    """Return what OpenCLIP's flags, by their Python names, say about the model."""
    size = flags["force_image_size"]
    if isinstance(size, list | tuple):
        size = size[0] if len(size) == 1 else tuple(size)
    trace = flags["batch_size"] if flags["trace"] else None
    return from_flags(ModelConfig, flags, force_image_size=size, trace=trace, lora=from_flags(LoraConfig, flags))


def writes_nothing(logs: str | None) -> bool:
    """Return whether ``--logs`` asks for no files."""
    return not logs or logs.lower() == "none"


def _destinations(report_to: str) -> frozenset[str]:
    asked = {name.strip() for name in report_to.split(",") if name.strip()}
    if not asked <= _DESTINATIONS | {"all"}:
        raise UsageError(f"--report-to {report_to}: known are wandb, tensorboard, all")
    return _DESTINATIONS if "all" in asked else frozenset(asked)
