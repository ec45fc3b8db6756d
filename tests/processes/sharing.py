"""A worker: the update shared between ranks."""

import keras_towers as kt
from tests.kit.ranks import main
from tests.processes import exact, shares  # noqa: F401

if __name__ == "__main__":
    kt.virtual_towers(2)
    main()
