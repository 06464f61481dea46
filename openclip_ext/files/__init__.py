"""Atomic writing of files, JSON lines, JSON of a known schema."""
