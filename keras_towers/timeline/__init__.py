"""A timeline of ``fit``: a trace, a table of phases, and a line of advice."""
