"""Score how odd a piece of text is against its corpus's baseline: no model, millions of tokens a second."""
