"""Atomic writing of files, JSON lines, and JSON with a known schema."""
