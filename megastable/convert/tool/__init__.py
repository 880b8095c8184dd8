"""Commands of `megastable checkpoint`, a module for each group: what they do and print."""
