"""Trials held again from a checkpoint, with more candidates than a run has time for; and what was skipped, tried again."""
