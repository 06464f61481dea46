"""HTML pages and SVG charts. They have one style, are readable in dark and light themes, and load no external files."""
