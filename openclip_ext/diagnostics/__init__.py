"""Diagnostic commands for training runs: checks, plans, curves, estimation errors, and inspection of the data."""
