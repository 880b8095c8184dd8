"""Text from a checkpoint: what was trained, continuing what a person types. The command is tools/generate.py."""
