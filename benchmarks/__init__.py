"""Benchmarks of a run's costs, behind tools/bench.py."""
