"""What is installed on a machine, and whether it works together."""
