"""Inspect the training data of a run: duplicates, likely false negatives, misfits, hardest and easiest samples.

A misfit is an image or a caption without a good match. The program counts and lists all findings with index, shard and key,
shows them on a page with thumbnails, and can write a manifest that excludes them. ``findings.DEFINITIONS`` and
``docs/inspect.md`` define the categories.
"""
