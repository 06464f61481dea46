"""Shards: local or remote tar files of samples."""
