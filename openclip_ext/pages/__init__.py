"""HTML pages and SVG charts. They share one style, are readable in dark and light themes, and load no external files."""
