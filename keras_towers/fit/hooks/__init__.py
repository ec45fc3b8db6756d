"""Patches of Keras."""
