"""The commands of the tools: a module each, which megastable/commands/root.py starts."""
