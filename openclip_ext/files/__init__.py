"""Files: written whole or not at all, JSON lines, JSON of a known shape."""
