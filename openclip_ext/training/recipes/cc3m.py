"""CC3M: ResNet-50, a global batch of 1024, 37 epochs (FastCLIP's and AmorLIP's medium scale)."""

from openclip_ext.training.recipes.sources import (
    AMORLIP,
    FAST_CLIP,
    NPN,
    NPN_NOTE,
    OPENCLIP_DISTRIBUTED,
    SIGLIP_NOTE,
    Options,
    Setting,
    datacomp,
)

_SETTING = Setting(
    dataset="cc3m",
    openclip_flags={"model": "RN50", "epochs": 37, "batch-size": 128, "lr": 1e-3, "wd": 0.1, "warmup": 10_000},
    dataset_size=2_723_840,
    samples_seen=100_000_000,
)
_AMORLIP_SETTING = Setting(
    dataset="cc3m",
    openclip_flags={"model": "RN50", "epochs": 30, "batch-size": 1024, "lr": 1e-3},
    dataset_size=2_274_566,
    samples_seen=30 * 2_274_566,
    gpus=1,
)

_COMMAND = f"the CC3M command in the README of {FAST_CLIP}"
_TABLE = "NeuCLIP, Table 7"
_COSINE_GAMMA: Options = {"gamma": 0.2, "gamma_schedule": "cosine", "gamma_decay_epochs": 18}
_CONSTANT_GAMMA_NOTE = "the value of the constant γ is in none of the sources at hand: the loss's default"
_PER_SAMPLE: Options = {"temperature": 0.03, "lr_tau": 0.0133, "rho": 7.0}
_PER_SAMPLE_NOTE = (
    "lr-tau is the released code's, which divides by the second moment of the gradient; here it is Adam's rate, which "
    "divides by the root of it"
)

RECIPES = (
    _SETTING.recipe(
        "openclip",
        {},
        f"NeuCLIP, Tables 1 and 3; {_COMMAND}",
        datacomp(_TABLE, (21.84, 0.23), (14.73, 0.22), (22.25, 0.38)),
        extra_flags=OPENCLIP_DISTRIBUTED,
    ),
    _SETTING.recipe(
        "siglip",
        {},
        "NeuCLIP, Tables 1 and 3",
        datacomp(_TABLE, (22.19, 0.11), (16.08, 0.16), (22.13, 0.52)),
        (SIGLIP_NOTE,),
    ),
    _SETTING.recipe(
        "sogclr",
        {"temperature": 0.07},
        f"{_COMMAND}, for FastCLIP-v1: SogCLR differs from it in the schedule of γ only",
        datacomp("AmorLIP, Table 1, 30 epochs on 2.27 M pairs", 21.47, 17.03, 22.04),
        (_CONSTANT_GAMMA_NOTE,),
    ),
    _SETTING.recipe(
        "isogclr",
        _PER_SAMPLE,
        f"{_COMMAND}, for FastCLIP-v2: iSogCLR differs from it in the schedule of γ only",
        notes=(_CONSTANT_GAMMA_NOTE, _PER_SAMPLE_NOTE),
    ),
    _SETTING.recipe(
        "fastclip-v0",
        {"temperature": 0.07, **_COSINE_GAMMA},
        _COMMAND,
        notes=("the temperature learns at the encoders' rate and with their schedule",),
    ),
    _SETTING.recipe("fastclip-v1", {"temperature": 0.07, **_COSINE_GAMMA}, _COMMAND),
    _SETTING.recipe("fastclip-v2", {**_PER_SAMPLE, **_COSINE_GAMMA}, _COMMAND, notes=(_PER_SAMPLE_NOTE,)),
    _SETTING.recipe(
        "fastclip",
        {"temperature": 0.07, "rho": 6.5, "lr_tau": 2e-4, **_COSINE_GAMMA},
        _COMMAND,
        datacomp(_TABLE, (24.74, 0.35), (19.09, 0.20), (29.56, 0.25)),
    ),
    _AMORLIP_SETTING.recipe(
        "amorlip",
        {
            "rho": 6.5,
            "rho_end": -8.0,
            "rho_switch": 0.75,
            **AMORLIP,
            "width_factor": 0.5,
            "fit_every": 8,
            "ema_decay": 0.999,
        },
        "AmorLIP, Section 4 and Appendix C, medium scale",
        datacomp("AmorLIP, Table 1", 24.11, 18.92, 27.34)
        + datacomp("NeuCLIP, Table 7, on 2.72 M pairs", (22.89, 0.20), (17.78, 0.43), (24.32, 0.53)),
        ("the temperature's learning rate, weight decay and warm-up are not given at this scale: defaults",),
    ),
    _SETTING.recipe(
        "neuclip",
        {"rho": 6.5, "lr_tau": 1.25e-4, **NPN},
        "NeuCLIP, Tables 1, 3 and 4",
        datacomp(_TABLE, (25.08, 0.39), (19.85, 0.37), (30.53, 0.37)),
        (NPN_NOTE,),
    ),
)
