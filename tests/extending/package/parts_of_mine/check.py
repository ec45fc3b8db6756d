"""What each rank checks: ``keras-towers run -np 2 -m parts_of_mine.check``."""

import functools

import keras_towers as kt
from keras_towers.extending import check_strategy
from parts_of_mine.hooks import in_float64

if __name__ == "__main__":
    kt.virtual_towers(2)
    make = functools.partial(kt.strategy, "through-folder", towers=2)
    check_strategy(make, ["gan"])
    check_strategy(
        functools.partial(make, compression=in_float64), ["embedding-clipped"]
    )
    print("as one device")
