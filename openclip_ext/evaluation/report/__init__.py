"""Compare runs in tables and charts."""
