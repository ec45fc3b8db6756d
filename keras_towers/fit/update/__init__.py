"""From per-tower gradients to new weights."""
