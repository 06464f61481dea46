"""openclip_ext: global contrastive losses, index-aware data and exact resuming for OpenCLIP.

The public names are loaded on first use, so that ``import openclip_ext`` itself costs nothing.
"""

from typing import TYPE_CHECKING, Any

from openclip_ext.version import __version__

if TYPE_CHECKING:
    from openclip_ext.integrations.openclip_script import register
    from openclip_ext.losses.registry import create_loss, list_losses

__all__ = ["__version__", "create_loss", "list_losses", "register"]

_HOMES = {
    "create_loss": "openclip_ext.losses.registry",
    "list_losses": "openclip_ext.losses.registry",
    "register": "openclip_ext.integrations.openclip_script",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'openclip_ext' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
