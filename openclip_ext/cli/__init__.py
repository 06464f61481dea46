"""Code shared by all commands: the console program, options and flags, errors and messages."""
