"""Hold trials from a checkpoint: of an incident, with more candidates than a run has time for; of what is skipped."""
