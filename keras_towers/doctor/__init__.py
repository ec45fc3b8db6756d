"""The packages installed on a machine, and whether they work together."""
