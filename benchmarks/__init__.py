"""Benchmarks of a run's costs, behind megastable bench."""
