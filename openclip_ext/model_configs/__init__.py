"""Additional model configurations, such as ``--model demo-resnet`` and ``--model demo-vit``."""

from pathlib import Path


def add_model_configs() -> None:
    """Register the configurations of this folder with OpenCLIP, by file name. Repeated calls have no effect."""
    import open_clip

    names = {path.stem for path in Path(__file__).parent.glob("*.json")}
    if not names <= set(open_clip.list_models()):
        open_clip.add_model_config(Path(__file__).parent)
