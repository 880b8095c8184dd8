"""Holds the commands of `megastable`, one module each. Only cli.py imports them, and only the one requested."""
