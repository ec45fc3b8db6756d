"""A worker whose rank 1 fails in its third step, in the way argv names."""

import keras_towers as kt

# The faults under Horovod's strategy, under this one.
kt.HorovodStrategy = kt.BytePSStrategy

import tests.processes.faults  # noqa: E402, F401
