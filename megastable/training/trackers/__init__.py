"""Shows a run in TensorBoard, Weights & Biases, MLflow, a file or a program of the user's (docs/trackers.md).

Rank 0 sends records to one process (`training/tracking.py`), where every tracker has a thread of its own. So neither a
library nor a network touches training: it has no lock, memory, signal handler or exit in common with them.
"""
