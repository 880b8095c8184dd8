"""Score documents by a checkpoint: their loss, window by window, and their gradient."""
