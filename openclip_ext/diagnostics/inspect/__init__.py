"""Inspect the training data of a run: duplicates, likely false negatives, misfits, hardest and easiest samples.

The program counts and lists these samples with index, shard and key, shows them on a page with thumbnails, and can write a
manifest that excludes them. ``findings.DEFINITIONS`` and ``docs/inspect.md`` define the categories.
"""
