"""``keras-towers bench``: strategies compared on one model."""
