"""Comparing evaluated runs in tables and charts: ``python -m eval.report``."""
