"""Checks of what is installed, and of this machine."""
