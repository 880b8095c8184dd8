"""Defines the journal's event classes, by theme, and one reader (reading.py; follow.py for a growing file).

Names of events and of their fields never change: later versions read old journals.
"""
