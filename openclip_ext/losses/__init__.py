"""The losses, one file per method, with the paper, the equations, the classes, and ``METHOD`` with the defaults."""
