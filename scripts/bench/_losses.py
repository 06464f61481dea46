"""Which losses the benchmarks compare, and with which options."""

from openclip_ext.losses import registry

# Those of images with texts.
IMAGE_TEXT_LOSSES = [name for name in registry.list_losses() if registry.options_used_by(name).get("views", 1) == 1]


def prototypes_option(loss_name: str, number: int) -> dict[str, int]:
    """The option that sets the number of prototypes, for a loss that has some."""
    return {"prototypes": number} if "prototypes" in registry.options_used_by(loss_name) else {}
