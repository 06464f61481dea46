"""Code that all commands share: the console program, options and flags, errors, messages."""
