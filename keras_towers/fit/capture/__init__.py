"""A tower's step up to its optimizer: run, traced once for all, compiled."""
