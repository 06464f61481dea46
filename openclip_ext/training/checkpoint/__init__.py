"""Checkpoints: their format, saving, finding and restoring."""
