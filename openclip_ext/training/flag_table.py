"""Our flags as a table, which ``--help`` reads from a file: the losses and the parts of a training need torch.

``python -m tests.losses.option_tables`` writes the file anew; a test says when it is out of date. Nothing but the help reads
it: a training takes its flags from the code.
"""

import dataclasses
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from openclip_ext.cli.options import Option
from openclip_ext.losses.options import option_from

FILE = Path(__file__).with_name("flags.json")


@dataclass(frozen=True)
class FlagTable:
    """The flags that OpenCLIP does not have.

    Attributes:
        options: of all losses, in the order of the help.
        defaults: for each loss the options that it uses in a training of which nothing else is said, with their defaults.
        summaries: the first sentence about each loss.
        run_options: all other flags but ``--loss`` and ``--recipe``, by their headings in the help.
    """

    options: tuple[Option, ...]
    defaults: dict[str, dict[str, Any]]
    summaries: dict[str, str]
    run_options: dict[str, tuple[Option, ...]] = field(default_factory=dict)


def of_losses() -> FlagTable:
    """Return the losses' flags as the code has them; imports torch."""
    from openclip_ext.losses import registry

    defaults = {loss: registry.training_defaults(loss, {}) for loss in registry.list_losses()}
    summaries = {loss: registry.SUMMARIES.get(loss, "").partition(". ")[0].rstrip(".") for loss in defaults}
    return FlagTable(tuple(registry.OPTIONS.values()), defaults, summaries)


def of_training() -> FlagTable:
    """Return all flags as the code has them; imports torch."""
    from openclip_ext.cli.options import own_options
    from openclip_ext.training.config import FLAG_GROUPS

    groups = {title: tuple(own_options(configs)) for title, configs in FLAG_GROUPS.items()}
    return dataclasses.replace(of_losses(), run_options=groups)


def from_file() -> FlagTable:
    """Return the table as it was last written."""
    content = json.loads(FILE.read_text(encoding="utf-8"))
    groups = {title: tuple(map(option_from, group)) for title, group in content["run_options"].items()}
    return FlagTable(tuple(map(option_from, content["options"])), content["defaults"], content["summaries"], groups)
