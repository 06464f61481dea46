"""DFN-14M: ViT-B/32, a global batch of 4096, 320 M pairs seen."""

from openclip_ext.training.recipes.sources import (
    DRRHO_CLIP,
    NPN,
    NPN_NOTE,
    OPENCLIP_DISTRIBUTED,
    SIGLIP_NOTE,
    Setting,
    datacomp,
)

_SETTING = Setting(
    dataset="dfn14m",
    openclip_flags={"model": "ViT-B-32", "epochs": 23, "batch-size": 512, "lr": 5e-4, "wd": 0.2, "warmup": 500},
    dataset_size=13_700_000,
    samples_seen=320_000_000,
)
_TABLE = "NeuCLIP, Table 9"
_EPOCHS_NOTE = "320 M pairs are 23.4 epochs: 23"

RECIPES = (
    _SETTING.recipe(
        "openclip",
        {},
        "NeuCLIP, Tables 1 and 3",
        datacomp(_TABLE, (37.78, 0.05), (32.65, 0.20), (24.33, 0.06)),
        (_EPOCHS_NOTE,),
        OPENCLIP_DISTRIBUTED,
    ),
    _SETTING.recipe(
        "siglip",
        {},
        "NeuCLIP, Tables 1 and 3",
        datacomp(_TABLE, (37.23, 0.10), (32.89, 0.17), (23.97, 0.20)),
        (_EPOCHS_NOTE, SIGLIP_NOTE),
    ),
    _SETTING.recipe(
        "fastclip",
        {
            "temperature": 0.07,
            "rho": 11.0,
            "lr_tau": 1.25e-4,
            "gamma": 0.43,
            "gamma_schedule": "cosine",
            "gamma_decay_epochs": 23,
        },
        "NeuCLIP, Tables 1 and 3",
        datacomp(_TABLE, (38.45, 0.06), (33.03, 0.06), (25.15, 0.11)),
        (
            _EPOCHS_NOTE,
            "γ and its decay are not given: the rule min(1, 4.177·epochs^-0.7265), over all epochs, "
            f"in the README of {DRRHO_CLIP}",
            "the temperature's learning rate is not given: a quarter of the encoders', as on DFN-192M",
        ),
    ),
    _SETTING.recipe(
        "neuclip",
        {"rho": 11.0, "lr_tau": 6.25e-5, **NPN},
        "NeuCLIP, Tables 1, 3 and 4",
        datacomp(_TABLE, (39.16, 0.20), (33.79, 0.07), (26.60, 0.28)),
        (_EPOCHS_NOTE, NPN_NOTE),
    ),
)
