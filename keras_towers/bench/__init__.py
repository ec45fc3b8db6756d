"""``keras-towers bench``: strategies compared on one model.

``models``
  The models of the benchmark: its own, or the user's.
``rows``
  The rows of the benchmark: how each trains in one process, and is timed.
``runner``
  Measures cells, each in fresh processes with a time limit.
``cell_process``
  One process that measures one cell.
"""
