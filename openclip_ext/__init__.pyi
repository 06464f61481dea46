# Written by python -m tests.losses.option_tables.
from typing import Any, Literal

from openclip_ext.cli.options import OptionError as OptionError
from openclip_ext.contrastive.loss import ContrastiveLoss as ContrastiveLoss
from openclip_ext.data import with_index as with_index
from openclip_ext.diagnostics.estimation_error import measure as measure
from openclip_ext.integrations.model_loss import ModelLoss as ModelLoss
from openclip_ext.integrations.openclip_script import register as register
from openclip_ext.losses.registry import list_losses as list_losses
from openclip_ext.losses.registry import register_method as register_method

__version__: str

def create_loss(
    name: Literal[
        "amorlip",
        "cliplite",
        "fastclip",
        "fastclip-v0",
        "fastclip-v1",
        "fastclip-v2",
        "fastclip-v3",
        "isogclr",
        "neuclip",
        "neuclip-paper",
        "openclip",
        "queueclip",
        "scent",
        "siglip",
        "simclr",
        "sogclr",
        "tempnet",
    ]
    | str,
    embed_dim: int | None = ...,
    num_samples: int | None = ...,
    reference_dim: int | None = ...,
    *,
    normalizer: Literal["minibatch", "mlp", "moving-average", "prototypes", "queue", "scent"] | str | None = ...,
    temperature_scheme: Literal["constant", "global", "solved", "per-sample", "predicted"] | str | None = ...,
    views: int = ...,
    equal_captions: Literal["negative", "mask", "positive"] = ...,
    steer: bool = ...,
    distill: float = ...,
    mask_margin: float | None = ...,
    reference_temperature: float = ...,
    eps: float = ...,
    temperature: float | None = ...,
    rho: float = ...,
    temperature_min: float = ...,
    temperature_max: float = ...,
    lr_tau: float | None = ...,
    epochs: int = ...,
    rho_end: float | None = ...,
    rho_switch: float = ...,
    temperature_queue: int = ...,
    seed: int = ...,
    normalizer_updates: int = ...,
    normalizer_lr: float = ...,
    normalizer_objective: Literal["unified", "l2-log", "kl", "js", "kl-printed"] = ...,
    l2_log_weight: float = ...,
    width_factor: float = ...,
    fit_every: int = ...,
    target_every: int = ...,
    ema_decay: float = ...,
    previous_weight: float = ...,
    reinitialize: bool = ...,
    gamma: float = ...,
    gamma_schedule: Literal["constant", "cosine"] = ...,
    gamma_decay_epochs: int | None = ...,
    prototypes: int = ...,
    alpha_gradient: bool = ...,
    restart_every: int | None = ...,
    normalizer_reset: bool = ...,
    simultaneous: bool = ...,
    verify_fit: bool = ...,
    alpha_tau_gradient: bool = ...,
    batch_weight: float = ...,
    leave_own_out: bool = ...,
    kappa: float = ...,
    negatives_only: bool = ...,
    gather_stage2: bool = ...,
    projection_dim: int | None = ...,
    local_loss: bool = ...,
    gather_with_grad: bool = ...,
    coca_caption_loss_weight: float = ...,
    coca_contrastive_loss_weight: float = ...,
    loss_dist_impl: Literal["bidir", "shift", "reduce", "gather"] | None = ...,
    hard_share: float = ...,
    **options: Any,
) -> ContrastiveLoss: ...
