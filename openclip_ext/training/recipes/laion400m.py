"""LAION-400M: ViT-B/16, a global batch of 5120, 30 epochs of 315 M pairs (FastCLIP's extra-large scale)."""

from openclip_ext.training.recipes.sources import Setting

_SETTING = Setting(
    dataset="laion400m",
    openclip_flags={"model": "ViT-B-16", "epochs": 30, "batch-size": 640, "lr": 2e-4},
    dataset_size=315_000_000,
    samples_seen=30 * 315_000_000,
)

RECIPES = (
    _SETTING.recipe(
        "fastclip",
        {
            "temperature": 0.07,
            "rho": 16.0,
            "lr_tau": 5e-5,
            "eps": 1e-6,
            "gamma": 0.8,
            "gamma_schedule": "cosine",
            "gamma_decay_epochs": 10,
        },
        "FastCLIP (Wei et al., arXiv 2407.01445), extra-large scale",
        notes=(
            "the source's learning rate ends at 4e-5, that of OpenCLIP's cosine schedule at 0",
            "weight decay and warm-up are in none of the sources at hand: OpenCLIP's defaults",
            "no table with the source's result is at hand",
        ),
    ),
)
