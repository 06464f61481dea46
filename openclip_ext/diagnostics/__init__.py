"""Tools around a training: checks, plans, curves, estimation errors, and the inspection of its data."""
