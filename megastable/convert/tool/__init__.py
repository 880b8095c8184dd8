"""Commands of `tools/checkpoint.py`, a module for each group: what they do and print."""
