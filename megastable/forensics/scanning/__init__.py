"""Whole corpora scanned for odd and duplicate documents: in several processes, resumable, in constant memory."""
