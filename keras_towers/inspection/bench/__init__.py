"""``keras-towers bench``: strategies compared on one model.

``models``
  The models of the benchmark: its own, or the user's.
``rows``
  The rows of the benchmark: how each trains in one process, and is timed.
``runner``
  Runs the cells of a benchmark, each in fresh processes with a time limit.
``cell_process``
  A process that measures one cell: trains, and takes the times.
"""
