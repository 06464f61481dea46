"""Code that all commands use: the console program, options and flags, errors and messages."""
