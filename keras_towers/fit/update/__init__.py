"""From the towers' gradients to new weights."""
