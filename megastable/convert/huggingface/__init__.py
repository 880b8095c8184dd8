"""Checkpoints out to a folder that Hugging Face's transformers load, and in from one, by one table of names."""
