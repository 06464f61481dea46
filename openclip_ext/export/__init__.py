"""A checkpoint as a folder for other people: OpenCLIP and transformers load it. Page: ``docs/export.md``."""
