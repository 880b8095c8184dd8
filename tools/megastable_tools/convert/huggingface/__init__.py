"""Export checkpoints to folders that Hugging Face's transformers load, and import them, by one table of names."""
