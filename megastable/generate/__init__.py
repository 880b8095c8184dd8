"""Generates text from a checkpoint. The command is tools/generate.py."""
