"""How odd a piece of text is, measured against what is usual in a corpus; no model, millions of tokens a second."""
