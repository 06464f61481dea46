"""CC12M: ViT-B/32, a global batch of 2048, 33 epochs (FastCLIP's and AmorLIP's large scale)."""

from openclip_ext.training.recipes.schema import Result
from openclip_ext.training.recipes.sources import (
    AMORLIP,
    AMORLIP_CODE,
    DIST_TEMPNET,
    FAST_CLIP,
    NPN,
    NPN_NOTE,
    OPENCLIP_DISTRIBUTED,
    SIGLIP_NOTE,
    Setting,
    datacomp,
)

_SETTING = Setting(
    dataset="cc12m",
    openclip_flags={"model": "ViT-B-32", "epochs": 33, "batch-size": 256, "lr": 4e-4, "wd": 0.1, "warmup": 10_000},
    dataset_size=9_187_328,
    samples_seen=300_000_000,
)
_AMORLIP_SETTING = Setting(
    dataset="cc12m",
    openclip_flags={
        "model": "ViT-B-32",
        "epochs": 33,
        "batch-size": 2048,
        "lr": 4e-4,
        "wd": 0.2,
        "warmup": 10_000,
        "grad-clip-norm": 1.0,
    },
    dataset_size=8_059_642,
    samples_seen=33 * 8_059_642,
    gpus=1,
)

_TEMPNET_SETTING = Setting(
    dataset="cc12m",
    openclip_flags={"model": "ViT-B-32", "epochs": 33, "batch-size": 512, "lr": 8e-4, "wd": 0.02, "warmup": 2000},
    dataset_size=9_184_307,
    samples_seen=33 * 9_184_307,
)

_TABLE = "NeuCLIP, Table 8"
_TEMPNET_LOG = "the log ViTb32-cosine-decay-cc12m-DistTempNet-v1 of github.com/anantmehta33/DistTempNet, last epoch"

RECIPES = (
    _SETTING.recipe(
        "openclip",
        {},
        "NeuCLIP, Tables 1 and 3",
        datacomp(_TABLE, (27.91, 0.77), (21.21, 0.04), (26.94, 0.59)),
        extra_flags=OPENCLIP_DISTRIBUTED,
    ),
    _SETTING.recipe(
        "siglip",
        {},
        "NeuCLIP, Tables 1 and 3",
        datacomp(_TABLE, (28.60, 0.35), (22.67, 0.05), (27.99, 0.25)),
        (SIGLIP_NOTE,),
    ),
    _SETTING.recipe(
        "fastclip",
        {
            "temperature": 0.07,
            "rho": 8.5,
            "lr_tau": 1e-4,
            "gamma": 0.2,
            "gamma_schedule": "cosine",
            "gamma_decay_epochs": 16,
        },
        f"the CC12M command in the README of {FAST_CLIP}",
        datacomp(_TABLE, (31.50, 0.43), (24.61, 0.05), (32.33, 0.48)),
    ),
    _TEMPNET_SETTING.recipe(
        "tempnet",
        {
            "rho": 9.5,
            "lr_tau": 3e-5,
            "temperature_min": 1e-3,
            "gamma": 0.8,
            "gamma_schedule": "cosine",
            "gamma_decay_epochs": 20,
        },
        f"the CC12M command in the README of {DIST_TEMPNET}, its version 1 (cosine γ)",
        (Result("COCO text R@1", 28.56, _TEMPNET_LOG), Result("COCO image R@1", 18.52, _TEMPNET_LOG)),
        (
            "weight decay, warm-up, the temperature's lower bound and the epochs in which γ falls are the released code's",
            "the released network has as many prototypes as a GPU has pairs, 512; here 256, as in the TempNet paper's code",
            "the source's learning rate starts and ends at 1e-5, that of OpenCLIP's schedule at 0",
            "Adam's β and ε are OpenCLIP's",
        ),
    ),
    _AMORLIP_SETTING.recipe(
        "amorlip",
        {
            "rho": 8.5,
            "rho_end": -8.5,
            "rho_switch": 2 / 3,
            "lr_tau": 1e-4,
            **AMORLIP,
            "width_factor": 1.0,
            "fit_every": 1,
            "ema_decay": 0.92,
        },
        f"AmorLIP, Section 4 and Appendix C, large scale; the command in the README of {AMORLIP_CODE}",
        datacomp("AmorLIP, Table 1", 30.66, 24.23, 30.09)
        + datacomp("NeuCLIP, Table 8, on 9.19 M pairs", (29.86, 0.83), (23.48, 0.62), (28.97, 0.77)),
        ("weight decay, warm-up, gradient clipping and lr-tau are the released command's, not the paper's",),
    ),
    _SETTING.recipe(
        "neuclip",
        {"rho": 8.5, "lr_tau": 5e-5, **NPN},
        "NeuCLIP, Tables 1, 3 and 4",
        datacomp(_TABLE, (31.89, 0.15), (25.09, 0.12), (32.93, 0.16)),
        (NPN_NOTE,),
    ),
)
