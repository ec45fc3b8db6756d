"""A worker: all checks of the drop-in on two ranks, in one job."""

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras_towers as kt

kt.virtual_towers(2)

import keras_towers.horovod as hvd  # noqa: E402
from tests.horovod import callbacks, tapes, training  # noqa: E402, F401
from tests.kit.ranks import main  # noqa: E402

if __name__ == "__main__":
    hvd.init()
    main()
