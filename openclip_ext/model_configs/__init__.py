"""Model configurations of the demo, for ``--model demo-resnet`` and ``--model demo-vit``."""

from pathlib import Path


def add_model_configs() -> None:
    """Make the configurations in this folder known to OpenCLIP under their file names. Idempotent."""
    import open_clip

    names = {path.stem for path in Path(__file__).parent.glob("*.json")}
    if not names <= set(open_clip.list_models()):
        open_clip.add_model_config(Path(__file__).parent)
