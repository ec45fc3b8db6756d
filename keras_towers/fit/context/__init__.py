"""The tower that this thread runs, and attributes of objects that are ours."""
