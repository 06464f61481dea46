"""Evaluate checkpoints: the package ``openclip_ext.eval``, which is also called ``eval`` in a clone.

In a clone, importing ``eval.X`` imports the module ``openclip_ext.eval.X``. So ``python -m eval.datacomp`` works there, and no
class exists twice.
"""

import importlib
import importlib.util
import sys
from importlib.abc import InspectLoader, Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import CodeType, ModuleType
from typing import Any, cast


class _OneIdentity(MetaPathFinder, Loader):
    """Imports ``eval.X`` as the module ``openclip_ext.eval.X``."""

    def find_spec(self, name: str, path: object, target: object = None) -> ModuleSpec | None:
        """Find ``eval.X`` where ``openclip_ext.eval.X`` is."""
        spec = importlib.util.find_spec(f"openclip_ext.{name}") if name.startswith("eval.") else None
        if spec is None:
            return None
        found = ModuleSpec(name, self, origin=spec.origin, is_package=spec.submodule_search_locations is not None)
        found.has_location = True
        return found

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Import the module under its own name, and keep in ``spec`` what the import is about to overwrite."""
        module = importlib.import_module(f"openclip_ext.{spec.name}")
        spec.loader_state = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Restore what importing under a second name has changed; the module has been executed already."""
        spec: Any = module.__spec__
        module.__spec__ = spec.loader_state

    def get_code(self, name: str) -> CodeType | None:
        """Return the code that ``python -m eval.X`` runs."""
        spec: Any = importlib.util.find_spec(f"openclip_ext.{name}")
        return cast(InspectLoader, spec.loader).get_code(spec.name)


if __name__ == "eval":
    sys.meta_path.insert(0, _OneIdentity())
    sys.modules[__name__] = importlib.import_module("openclip_ext.eval")
