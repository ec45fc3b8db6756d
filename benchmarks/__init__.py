"""The benchmarks of the documentation: ``python -m benchmarks``."""
