"""Batches for towers, and what ranks agree on about their data."""
