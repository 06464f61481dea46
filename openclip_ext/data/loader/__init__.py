"""Loaders: batches of samples with their indices."""
