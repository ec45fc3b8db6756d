"""A worker: checks of ranks, all in one job, since starting one takes long."""

import os

import keras_towers as kt
from tests.kit.ranks import main
from tests.processes import (  # noqa: F401
    asking,
    callbacks,
    compression,
    differences,
    distribution,
    ended,
    exact,
    failures,
    mesh,
    over_tensorflow,
    own_loops,
    roles,
    rounds,
    saving,
    shares,
    shares_kept,
    small,
    steps,
    training,
)

if __name__ == "__main__":
    if "VIRTUAL_TOWERS" in os.environ:
        kt.virtual_towers(int(os.environ["VIRTUAL_TOWERS"]))
    # Connects the ranks, before anything of a check starts TensorFlow.
    small.Strategy()
    main()
