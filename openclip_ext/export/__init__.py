"""Export of a checkpoint as a folder that OpenCLIP and transformers load. Page: ``docs/fine-tuning.md``."""
