"""Horovod: its build, its transport, strategy, elastic jobs and drop-in."""
