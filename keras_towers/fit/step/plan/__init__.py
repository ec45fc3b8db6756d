"""Finds a plan of a step that fits into the memory of its devices."""
