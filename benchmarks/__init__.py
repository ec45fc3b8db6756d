"""The benchmarks of the documentation."""
