"""The methods. The file of a method contains the paper, the equations, the parts, and ``METHOD`` with the defaults."""
