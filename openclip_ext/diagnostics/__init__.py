"""Tools that look into a run: how good its estimates are, and what it will take."""
