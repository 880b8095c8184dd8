"""Scan whole corpora for odd and duplicate documents: parallel, resumable, in constant memory."""
