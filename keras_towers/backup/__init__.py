"""Training that goes on where an earlier run of it was."""
