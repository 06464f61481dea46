"""Fetching DataComp's evaluation sets, and checking them: ``python -m eval.download``."""
