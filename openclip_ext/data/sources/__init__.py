"""Sources: samples by index, from shards, CSV files, or made up."""
