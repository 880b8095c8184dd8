"""What `tools/checkpoint.py` does and prints: a module for each group of its commands."""
