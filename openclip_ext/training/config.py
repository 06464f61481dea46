"""The configuration of a training run: a tree of frozen dataclasses, filled from the flags. Nothing here imports torch.

Most fields declare a flag with its default, help and range (see ``openclip_ext/cli/options.py``). Each part of the training
program receives only its own part of the tree.
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
from openclip_ext.cli.options import cli_field, from_flags
from openclip_ext.data.loader.config import KeepConfig, TrainLoaderConfig
from openclip_ext.data.sources.spec import DataSpec

if TYPE_CHECKING:
    import torch

# Fields of ModelConfig that ``open_clip.create_model_and_transforms`` accepts under these names.
_FACTORY_OPTIONS = (
    *("pretrained", "pretrained_image", "precision", "cache_dir"),
    *("force_quick_gelu", "force_custom_text", "force_patch_dropout", "force_image_size", "force_context_length"),
    *("image_mean", "image_std", "image_interpolation", "image_resize_mode"),
)


@dataclass(frozen=True)
class LoraConfig:
    """Low-rank adapters, which are trained instead of the model's weights."""

    rank: int | None = cli_field(
        None, "rank of LoRA adapters to train (such as 16), with all other weights frozen", dest="lora_rank", minimum=1
    )
    alpha: float | None = cli_field(
        None,
        "LoRA's alpha: adapters are scaled by alpha / rank (default: twice the rank, so one --lr works for every rank)",
        dest="lora_alpha",
        needs="lora_rank",
        exclusive_minimum=0.0,
    )
    targets: str = cli_field(
        "both",
        "towers that get adapters; a tower without adapters is frozen",
        dest="lora_targets",
        needs="lora_rank",
        choices=("image", "text", "both"),
    )

    @property
    def scale(self) -> float:
        """The value of ``--lora-alpha``. The default is twice the rank."""
        return 2.0 * (self.rank or 0) if self.alpha is None else self.alpha


@dataclass(frozen=True)
class ModelConfig:
    """OpenCLIP's flags for building the model. Most fields are named as in ``open_clip``'s factory.

    A locked tower is frozen, except for the last ``unlocked`` layer groups. A separate flag freezes the text tower's LayerNorm
    parameters.
    """

    name: str = cli_field(dest="model")
    aug_cfg: Mapping[str, Any] = cli_field()
    pretrained: str | None = cli_field(None)
    pretrained_image: bool = cli_field(False)
    precision: str = cli_field("fp32")
    torchscript: bool = cli_field(False)
    force_quick_gelu: bool = cli_field(False)
    force_custom_text: bool = cli_field(False)
    force_patch_dropout: float | None = cli_field(None, minimum=0.0, exclusive_maximum=1.0)
    force_image_size: int | tuple[int, ...] | None = cli_field(None)
    force_context_length: int | None = cli_field(None, minimum=1)
    image_mean: Sequence[float] | None = cli_field(None)
    image_std: Sequence[float] | None = cli_field(None)
    image_interpolation: str | None = cli_field(None)
    image_resize_mode: str | None = cli_field(None)
    image_backend: str = cli_field(
        "pil",
        "library that decodes training images; torchvision takes a third of the CPU time, but rounds pixel values differently",
        choices=("pil", "torchvision"),
        needs="train_data",
    )
    cache_dir: str | None = cli_field(None)
    siglip_start: bool = cli_field(False, dest="siglip")
    lock_image: bool = cli_field(False)
    lock_image_unlocked_groups: int = cli_field(0, needs="lock_image", minimum=0)
    image_features: str | None = cli_field(
        None,
        "folder for the image embeddings of the training data: a locked image tower runs once, without augmentation, to "
        "write them",
        needs="lock_image",
    )
    lock_text: bool = cli_field(False)
    lock_text_unlocked_layers: int = cli_field(0, needs="lock_text", minimum=0)
    lock_text_freeze_layer_norm: bool = cli_field(False, needs="lock_text")
    grad_checkpointing: bool = cli_field(False)
    trace: int | None = None  # batch size for torch.jit.trace, used in evaluation only
    lora: LoraConfig = LoraConfig()

    @property
    def file_name(self) -> str:
        """Name of the model's configuration file: ``ViT-B-32`` for ``ViT-B/32``, ``m`` for ``local-dir:models/m``."""
        if not self.is_folder:
            return self.name.replace("/", "-")
        return re.sub(r"[^\w.-]", "-", os.path.basename(os.path.abspath(self.name.partition(":")[2])))

    @property
    def is_folder(self) -> bool:
        """Whether ``--model`` is a folder with a configuration and weights (``local-dir:`` or ``hf-hub:``)."""
        return ":" in self.name

    @property
    def weights(self) -> str | None:
        """Tag or file of the initial weights; None means random weights."""
        return self.pretrained or self.own_weights

    @property
    def is_pretrained(self) -> bool:
        """Whether the model has initial weights. A model of a hub has some, which may not be downloaded yet."""
        return bool(self.pretrained) or self.name.startswith("hf-hub:") or self.own_weights is not None

    @property
    def own_weights(self) -> str | None:
        """File of the weights that belong to ``--model``; None if it has none."""
        return compat.hub_weights(self.name, self.cache_dir)

    def create(self, device: "torch.device") -> tuple[Any, Callable, Callable]:
        """Return the unwrapped model, the training transform and the evaluation transform.

        The model has no values on the meta device, so pretrained weights are then neither downloaded nor read.
        """
        options = {name: getattr(self, name) for name in _FACTORY_OPTIONS} | {"aug_cfg": dict(self.aug_cfg)}
        if device.type == "meta":
            options |= {"pretrained": None, "pretrained_image": False}
        return compat.create_model(self.name, device, siglip_start=self.siglip_start, jit=self.torchscript, **options)

    def tokenizer(self) -> Callable:
        import open_clip

        return open_clip.get_tokenizer(self.name, cache_dir=self.cache_dir, context_length=self.force_context_length)


@dataclass(frozen=True)
class LossConfig:
    """The loss and its options."""

    name: str
    given: Mapping[str, Any] = field(default_factory=dict)  # options that the user or the recipe gave
    options: Mapping[str, Any] = field(default_factory=dict)  # all options, with the defaults of a short run
    without_effect: tuple[str, ...] = ()  # given flags that this loss does not use


def _tower_lr(tower: str) -> Any:
    hint = f"to freeze this tower, use --lock-{tower}"
    return cli_field(None, f"learning rate of the {tower} tower (default: --lr)", exclusive_minimum=0.0, hint=hint)


def _layer_decay(tower: str) -> Any:
    text = f"ratio of each {tower} layer's learning rate to the next layer's; the head has the full learning rate"
    return cli_field(1.0, text, exclusive_minimum=0.0, maximum=1.0)


@dataclass(frozen=True)
class OptimizerConfig:
    """The optimizer: ``adamw``, ``lamb`` (from timm), or ``timm/NAME``.

    ``weight_decay`` applies to parameters with more than one dimension. None means the default of the timm optimizer.
    """

    name: str = cli_field("adamw", dest="opt")
    lr: float = cli_field(5e-4, exclusive_minimum=0.0, hint="to evaluate only, remove --train-data")
    weight_decay: float = cli_field(0.2, dest="wd", minimum=0.0)
    beta1: float | None = cli_field(0.9, minimum=0.0, exclusive_maximum=1.0)
    beta2: float | None = cli_field(0.98, minimum=0.0, exclusive_maximum=1.0)
    eps: float | None = cli_field(1e-6, exclusive_minimum=0.0)
    momentum: float | None = cli_field(None, minimum=0.0, exclusive_maximum=1.0)
    lookahead_steps: int | None = cli_field(
        None, "optimizer steps per LookAhead step, with --opt timm/lookahead_NAME (CLIP-Lite: 5; default: 6)", minimum=1
    )
    kwargs: tuple[str, ...] = cli_field(
        (), "more arguments of the optimizer, each as NAME=VALUE, such as amsgrad=True", dest="opt_kwargs"
    )
    decay_excluded: tuple[str, ...] = cli_field(
        (), "name patterns of parameters without weight decay, such as '*positional_embedding'", dest="wd_exclude"
    )
    lr_image: float | None = _tower_lr("image")
    image_layer_decay: float = _layer_decay("image")
    lr_text: float | None = _tower_lr("text")
    text_layer_decay: float = _layer_decay("text")

    def tower_rates(self) -> dict[str, tuple[float, float]]:
        """Return each separately configured tower's learning rate, divided by ``--lr``, and its layer decay."""
        towers = {"image": (self.lr_image, self.image_layer_decay), "text": (self.lr_text, self.text_layer_decay)}
        return {
            tower: (1.0 if lr is None else lr / self.lr, decay)
            for tower, (lr, decay) in towers.items()
            if lr is not None or decay != 1
        }


@dataclass(frozen=True)
class ScheduleConfig:
    """The learning rate schedule. Only ``const-cooldown`` uses the ``cooldown_`` fields.

    ``warmup`` is a number of optimizer steps, or below 1, their share in the run.
    """

    name: str = cli_field("cosine", dest="lr_scheduler", choices=("cosine", "const", "const-cooldown"))
    lr: float = cli_field(5e-4)
    epochs: int = cli_field(32)
    warmup: float = cli_field(10_000, minimum=0)
    lr_min: float = cli_field(0.0, "learning rate at the end of --lr-scheduler cosine (FastCLIP: 4e-5)", minimum=0.0)
    cooldown_epochs: int | None = cli_field(None, dest="epochs_cooldown", minimum=0)
    cooldown_power: float = cli_field(1.0, dest="lr_cooldown_power", minimum=0.0)
    cooldown_end: float = cli_field(0.0, dest="lr_cooldown_end", minimum=0.0)
    skip: bool = cli_field(False, dest="skip_scheduler")

    def warmup_steps(self, steps: int) -> int:
        """Return the number of warm-up steps in a run of ``steps`` steps."""
        return round(self.warmup * steps) if self.warmup < 1 else int(self.warmup)


@dataclass(frozen=True)
class ParallelConfig:
    """How the model is distributed over processes, and whether it is compiled."""

    fsdp: bool = cli_field(False, "shard parameters, gradients and optimizer state over the processes (FSDP2, not DDP)")
    keep_gathered: bool = cli_field(
        False,
        "with --fsdp: keep parameters gathered from the forward to the backward pass; less communication, more memory",
        dest="fsdp_no_reshard_after_forward",
        needs="fsdp",
    )
    static_graph: bool = cli_field(False, dest="ddp_static_graph")
    sync_batchnorm: bool = cli_field(False, dest="use_bn_sync")
    compile: bool = cli_field(False, dest="torchcompile")
    compile_loss: bool = cli_field(
        False, "compile the loss: less host time per step, but a startup delay of up to several minutes"
    )
    grad_checkpointing: bool = cli_field(False)


@dataclass(frozen=True)
class StepConfig:
    """The flags of an optimizer step. ``precision`` is OpenCLIP's name for a combination of dtypes."""

    precision: str = cli_field("fp32")
    grad_clip_norm: float | None = cli_field(None, exclusive_minimum=0.0)
    text_groups: int = cli_field(
        4,
        "encode the texts of a batch in up to N groups of similar length, without the padding of OpenCLIP; 1: with padding",
        minimum=1,
        maximum=8,
        needs="train_data",
    )
    model_ema_decay: float | None = cli_field(
        None,
        "decay of a moving average of the weights, such as 0.9999; evaluations and checkpoints use the average",
        exclusive_minimum=0.0,
        exclusive_maximum=1.0,
        hint="a usual value is 0.9999",
    )


@dataclass(frozen=True)
class RunLength:
    """The number of epochs, and settings that count micro-batches or optimizer steps."""

    epochs: int = cli_field(minimum=1, hint="to evaluate only, remove --train-data")
    accum_freq: int = cli_field(1)
    log_every: int = cli_field(100, dest="log_every_n_steps", minimum=1)
    max_skipped_steps: int = cli_field(50, "stop after N consecutive steps with non-finite gradients", minimum=1)


@dataclass(frozen=True)
class SavePolicy:
    """When checkpoints are saved in ``folder`` (None means never), and which are kept. The last epoch is always saved."""

    folder: Path | None
    name: str
    every_epochs: int = cli_field(1, dest="save_frequency", minimum=0)
    every_steps: int = cli_field(0, "also save every N optimizer steps (0: never)", dest="save_every_steps", minimum=0)
    most_recent: bool = cli_field(False, dest="save_most_recent")
    delete_previous: bool = cli_field(False, dest="delete_previous_checkpoint")
    best_metric: str | None = cli_field(
        None, "save the model with the best value of this metric as best.pt", dest="keep_best"
    )


@dataclass(frozen=True)
class EvaluationConfig:
    """Evaluations at intervals of epochs, and after the last epoch. With an interval of 0, an evaluation never runs."""

    val_data: DataSpec | None = None
    val_every: int = cli_field(1, dest="val_frequency", minimum=0)
    # Images of the user's classes, with the class as caption (--val-classes), evaluated as often as val_data.
    class_data: DataSpec | None = None
    scores_kept: bool = False  # whether a held-out part of --keep-data is evaluated, as often as val_data
    kept_tasks: tuple[str, ...] = ()  # paths of --keep-tasks, evaluated as often as val_data
    imagenet_val: str | None = cli_field(None)
    imagenet_v2: str | None = cli_field(None)
    imagenet_every: int = cli_field(2, dest="zeroshot_frequency", minimum=0)
    suite: str | None = cli_field(
        None,
        "DataComp tasks to evaluate during training",
        dest="eval_suite",
        needs="eval_data_dir",
        choices=("quick", "full"),
    )
    suite_data: str | None = cli_field(None, "folder with DataComp's data", dest="eval_data_dir", needs="eval_suite")
    suite_every: int = cli_field(
        1, "evaluate --eval-suite every N epochs and after the last epoch", dest="eval_frequency"
    )
    batch_size: int = cli_field(64)
    workers: int = cli_field(0)

    @property
    def frequencies(self) -> list[int]:
        """The interval in epochs of each kind of evaluation that has data; 0 means never."""
        imagenet = self.imagenet_val or self.imagenet_v2
        kinds = (
            (self.val_data, self.val_every),
            (self.class_data, self.val_every),
            (self.scores_kept or None, self.val_every),
            (self.kept_tasks or None, self.val_every),
            (imagenet, self.imagenet_every),
            (self.suite, self.suite_every),
        )
        return [every for data, every in kinds if data is not None]

    @property
    def is_wanted(self) -> bool:
        """Whether any evaluation runs during training."""
        return any(every > 0 for every in self.frequencies)


@dataclass(frozen=True)
class FineTuningConfig:
    """What is scored and chosen before and after a run that starts from pretrained weights."""

    val_classes: str | None = cli_field(
        None, "images of your classes: a folder with a subfolder for each class, or a table with a column of classes"
    )
    keep_tasks: str | None = cli_field(
        None,
        "what the model must keep: class folders, tables of labels or pairs, or folders of DataComp, joined by '::'",
    )
    is_compared: bool = cli_field(
        True,
        "with --pretrained: score the pretrained model first, and mix its weights with the trained weights at the end",
        dest="before_after",
    )
    keep_at_least: float = cli_field(
        0.9,
        "the chosen mix of weights keeps this share of the pretrained model's score on held-out --keep-data and --keep-tasks",
        minimum=0.0,
        maximum=1.0,
    )


@dataclass(frozen=True)
class RunFolderConfig:
    """Where the run writes its files and logs."""

    logs: Path | None  # None means that no files are written
    name: str
    resume_latest: bool = False  # whether to continue the run that the folder contains, if any
    log_local_rank: int | None = None  # with --log-local: this process's rank on its node, where rank 0 logs
    rank: int = 0
    debug: bool = cli_field(False)
    remote_sync: str | None = cli_field(None)
    remote_every: int = cli_field(300, dest="remote_sync_frequency")
    remote_protocol: str = cli_field("s3", dest="remote_sync_protocol")

    @property
    def remote(self) -> str | None:
        """The URL to which the run folder is copied, or None."""
        return None if self.remote_sync is None else f"{self.remote_sync.rstrip('/')}/{self.name}"

    @property
    def folder(self) -> Path | None:
        """The run folder ``LOGS/NAME``; None if no files are written."""
        return None if self.logs is None else self.logs / self.name

    @property
    def log_file(self) -> str:
        """Name of the log file: ``out.log``, or with ``--log-local`` a separate file for each node."""
        return "out.log" if self.log_local_rank is None else f"out-{self.rank}"


@dataclass(frozen=True)
class ReportingConfig:
    """Destinations of metrics in addition to the log and ``metrics.jsonl``: ``wandb`` and ``tensorboard``."""

    destinations: frozenset[str] = frozenset()
    epochs: int = cli_field(1)
    warmup: float = cli_field(0)
    name: str = ""
    wandb_project: str = cli_field("open-clip", dest="wandb_project_name")
    wandb_notes: str = cli_field("")
    resumes: bool = False


@dataclass(frozen=True)
class Config:
    """What the user asked for. Nothing replaces it: :func:`openclip_ext.training.plan.resolve` derives the plan of a run.

    ``flags`` has all flags by Python name: first those of the user, then those of ``--recipe`` or ``--config``, else defaults.
    ``words`` are the arguments that repeat the run, without names and places (see :func:`openclip_ext.training.flags.parse`).
    """

    words: tuple[str, ...]
    flags: Mapping[str, Any]
    loss: str
    loss_options: Mapping[str, Any]  # options that the user or the recipe gave
    by_pairs: tuple[str, ...] = ()  # flags of ``--config`` whose values follow the number of training pairs


@dataclass(frozen=True)
class RunPlan:
    """Everything that is derived from a :class:`Config` for one process: the configurations of all parts of a run."""

    model: ModelConfig
    data: DataSpec | None  # None means that the run only evaluates
    keep: KeepConfig
    loading: TrainLoaderConfig
    loss: LossConfig
    optimizer: OptimizerConfig
    schedule: ScheduleConfig
    step: StepConfig
    parallel: ParallelConfig
    length: RunLength
    saving: SavePolicy
    evaluation: EvaluationConfig
    tuning: FineTuningConfig
    folder: RunFolderConfig
    reporting: ReportingConfig
    flags: Mapping[str, Any]  # the derived values of all flags, by Python name
    device: str | None = cli_field(None)  # None means OpenCLIP's default, cuda
    rank_patience: float | None = cli_field(
        600.0, "seconds without a rank's heartbeat after which the run ends ('none': never)", exclusive_minimum=0.0
    )
    shared_batch: int | None = cli_field(
        None,
        "samples per optimizer step over all GPUs; --batch-size is then a maximum, and --accum-freq a minimum",
        dest="global_batch",
        minimum=1,
    )
    dry_run: bool = cli_field(
        False,
        "take two steps with captions of full length, print their time and memory, and write nothing but the "
        "manifest of new shards",
        needs="train_data",
    )
    resume: str | None = cli_field(None)
    copy_codebase: bool = cli_field(False)

    @property
    def world_size(self) -> int:
        """Number of processes."""
        return self.flags["world_size"]

    @cached_property
    def stored_flags(self) -> dict[str, Any]:
        """The flags to write to the run folder: without secrets, and with the paths that OpenCLIP stores as flags."""
        folder, config = self.folder.folder, self.folder
        paths: dict[str, Any] = {"log_path": None, "checkpoint_path": None, "tensorboard_path": ""}
        if folder is not None:
            paths |= {"log_path": str(folder / config.log_file), "checkpoint_path": str(folder / "checkpoints")}
            if "tensorboard" in self.reporting.destinations:
                paths["tensorboard_path"] = str(folder / "tensorboard")
        return without_secrets({**self.flags, **paths, "name": config.name, "aug_cfg": dict(self.flags["aug_cfg"])})


# Dataclasses that are filled from flags. The keys are the headings of these flags in ``--help``.
FLAG_GROUPS: dict[str, tuple[type, ...]] = {
    "data": (DataSpec, KeepConfig, TrainLoaderConfig, ModelConfig),
    "optimization": (OptimizerConfig, ScheduleConfig, StepConfig, ParallelConfig, LoraConfig),
    "length, checkpoints and evaluation": (RunLength, SavePolicy, EvaluationConfig, FineTuningConfig),
    "the run": (RunFolderConfig, ReportingConfig, RunPlan),
}


def model_config(flags: Mapping[str, Any]) -> ModelConfig:
    """Return the model's configuration from a dictionary of OpenCLIP's flags by Python name."""
    size = flags["force_image_size"]
    if isinstance(size, list | tuple):
        size = size[0] if len(size) == 1 else tuple(size)
    trace = flags["batch_size"] if flags["trace"] else None
    return from_flags(ModelConfig, flags, force_image_size=size, trace=trace, lora=from_flags(LoraConfig, flags))


def writes_nothing(logs: str | None) -> bool:
    """Return whether the value of ``--logs`` means that no files are written."""
    return not logs or logs.lower() == "none"


def reporting_destinations(report_to: str) -> frozenset[str]:
    """Return the destinations in a value of ``--report-to``. Raise UsageError if one is unknown."""
    names = frozenset(name.strip() for name in report_to.split(",") if name.strip())
    if not names <= {"wandb", "tensorboard", "all"}:
        raise UsageError(f"--report-to {report_to}: expected one or more of wandb, tensorboard, all")
    return frozenset({"wandb", "tensorboard"}) if "all" in names else names
