"""HTML pages and SVG charts: one style, escaped, readable in dark and light, without anything from outside."""
