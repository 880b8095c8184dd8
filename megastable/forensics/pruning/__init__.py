"""Documents taken out of a corpus: a plan to edit, new shards without them, the proof that the rest is intact."""
