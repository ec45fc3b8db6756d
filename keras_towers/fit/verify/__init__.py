"""One step on one device and on towers that share it, for comparison."""
