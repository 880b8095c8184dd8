"""The guard in the loops of other stacks."""
