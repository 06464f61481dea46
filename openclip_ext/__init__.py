"""openclip_ext: global contrastive losses, data with sample indices, and exact resuming for OpenCLIP.

Public names are imported on first use, so ``import openclip_ext`` is fast. ``__init__.pyi`` declares their types.
"""

import importlib
from typing import Any

__version__ = "1.0.0"

_HOMES = {
    "ContrastiveLoss": "openclip_ext.contrastive.loss",
    "ModelLoss": "openclip_ext.integrations.model_loss",
    "OptionError": "openclip_ext.cli.options",
    "create_loss": "openclip_ext.losses.registry",
    "list_losses": "openclip_ext.losses.registry",
    "measure": "openclip_ext.diagnostics.estimation_error",
    "register": "openclip_ext.integrations.openclip_script",
    "register_method": "openclip_ext.losses.registry",
    "with_index": "openclip_ext.data",
}

__all__ = ["__version__", *_HOMES]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'openclip_ext' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
