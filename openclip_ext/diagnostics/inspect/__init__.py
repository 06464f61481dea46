"""Inspect the training data of a run: duplicates, likely false negatives, misfits, hardest and easiest samples.

It counts and lists them with index, shard and key, shows them on a page with thumbnails, and can write a manifest without
them. ``findings.DEFINITIONS`` and ``docs/inspect.md`` define the categories.
"""
