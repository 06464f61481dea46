"""Tools for training runs: checks, plans, curves, estimation errors, and the inspection of the data."""
