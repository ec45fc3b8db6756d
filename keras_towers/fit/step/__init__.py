"""One global batch on all towers, and its logs."""
