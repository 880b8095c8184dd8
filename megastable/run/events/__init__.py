"""Defines the journal's event classes, by theme, and one reader (reading.py).

Once released, names of events and of their fields do not change: a run outlives versions.
"""
