"""The events of a run's journal: a class for each (by theme), and one reader (reading.py; follow.py as a file grows).

Names of events and of their fields never change: a journal is read by versions to come.
"""
