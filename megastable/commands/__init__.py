"""The commands of `megastable`, a module for each. Only cli.py imports them, and only the one that is asked for."""
