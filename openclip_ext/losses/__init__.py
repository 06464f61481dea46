"""The methods, a file each: paper, equations, parts, defaults, and the ``METHOD`` that ``registry.py`` collects."""
