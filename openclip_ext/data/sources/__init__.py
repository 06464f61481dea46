"""Sources of samples by index: shards, CSV files and synthetic data."""
