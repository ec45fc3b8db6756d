"""Weights that parameter servers hold for several processes."""
