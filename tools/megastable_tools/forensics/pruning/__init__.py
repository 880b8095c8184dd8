"""Prune documents from a corpus: an editable plan, new shards without them, and a proof that the rest is intact."""
