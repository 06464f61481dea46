"""Tools that inspect a run: the error of its estimates, and what a training will need."""
