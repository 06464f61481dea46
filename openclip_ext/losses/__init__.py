"""The methods, one file each: paper, equations, parts, defaults, and the ``METHOD`` for ``registry.py``."""
