"""Export a checkpoint to a folder that OpenCLIP and transformers load. See ``docs/export.md``."""
