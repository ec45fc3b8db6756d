"""A package that has one of each part of a strategy."""
