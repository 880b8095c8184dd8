"""Generates text from a checkpoint. The command is megastable generate."""
