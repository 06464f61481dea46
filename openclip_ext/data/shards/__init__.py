"""Shards: tar files of samples, wherever they are."""
