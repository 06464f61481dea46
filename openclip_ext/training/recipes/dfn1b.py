"""DFN-1B: ViT-B/16, a global batch of 5120, 3 B pairs seen."""

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
    dataset="dfn1b",
    openclip_flags={"model": "ViT-B-16", "epochs": 3, "batch-size": 640, "lr": 3.125e-4, "wd": 0.2, "warmup": 500},
    dataset_size=1_000_000_000,
    samples_seen=3_000_000_000,
)
_TABLE = "NeuCLIP, Table 11"

RECIPES = (
    _SETTING.recipe(
        "openclip", {}, "NeuCLIP, Tables 1 and 3", datacomp(_TABLE, 56.25, 57.49, 55.27), (), OPENCLIP_DISTRIBUTED
    ),
    _SETTING.recipe("siglip", {}, "NeuCLIP, Tables 1 and 3", datacomp(_TABLE, 56.32, 57.20, 55.33), (SIGLIP_NOTE,)),
    _SETTING.recipe(
        "fastclip",
        {
            "temperature": 0.07,
            "rho": 11.0,
            "lr_tau": 7.8125e-5,
            "gamma": 1.0,
            "gamma_schedule": "cosine",
            "gamma_decay_epochs": 3,
        },
        "NeuCLIP, Tables 1 and 3",
        datacomp(_TABLE, 56.68, 57.87, 56.05),
        (
            f"γ and the temperature's learning rate are not given: as on DFN-192M, in the README of {DRRHO_CLIP}, "
            "whose rule for γ gives 1 here, too",
        ),
    ),
    _SETTING.recipe(
        "neuclip",
        {"rho": 11.0, "lr_tau": 3.9e-5, **NPN},
        "NeuCLIP, Tables 1, 3 and 4",
        datacomp(_TABLE, 57.34, 58.69, 56.71),
        (NPN_NOTE,),
    ),
)
