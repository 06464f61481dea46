"""The manifest of a data set of shards."""
