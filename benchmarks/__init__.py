"""What a run costs, measured. Behind tools/bench.py."""
