"""DFN-192M: ViT-B/16, a global batch of 5120, 1.3 B pairs seen."""

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
    dataset="dfn192m",
    openclip_flags={"model": "ViT-B-16", "epochs": 7, "batch-size": 640, "lr": 3.125e-4, "wd": 0.2, "warmup": 500},
    dataset_size=192_160_462,
    samples_seen=1_300_000_000,
)
_TABLE = "NeuCLIP, Table 10"

RECIPES = (
    _SETTING.recipe(
        "openclip", {}, "NeuCLIP, Tables 1 and 3", datacomp(_TABLE, 54.58, 55.16, 50.42), (), OPENCLIP_DISTRIBUTED
    ),
    _SETTING.recipe("siglip", {}, "NeuCLIP, Tables 1 and 3", datacomp(_TABLE, 54.26, 55.09, 50.49), (SIGLIP_NOTE,)),
    _SETTING.recipe(
        "fastclip",
        {
            "temperature": 0.07,
            "rho": 11.0,
            "lr_tau": 7.8125e-5,
            "gamma": 1.0,
            "gamma_schedule": "cosine",
            "gamma_decay_epochs": 7,
        },
        f"the FastCLIP command in the README of {DRRHO_CLIP}",
        datacomp(_TABLE, 54.72, 55.44, 50.53),
        ("with γ 1 the moving average is the batch's own estimate",),
    ),
    _SETTING.recipe(
        "neuclip",
        {"rho": 11.0, "lr_tau": 3.9e-5, **NPN},
        "NeuCLIP, Tables 1, 3 and 4",
        datacomp(_TABLE, 54.90, 55.88, 51.39),
        (NPN_NOTE,),
    ),
)
