"""Checkpoints of other frameworks, read and written without them."""
