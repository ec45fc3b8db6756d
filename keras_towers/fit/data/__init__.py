"""Per-tower batches, and agreement between ranks on their data."""
