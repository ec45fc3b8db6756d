"""The current tower of a thread, and temporary patching of attributes."""
