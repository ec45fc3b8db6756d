"""A script with a strategy at its top, whose data come from spawned processes.

argv: the name of the strategy. Python imports the script again in each of them.
"""

import multiprocessing
import sys

import keras
import numpy as np

import keras_towers as kt

strategy = getattr(kt, sys.argv[1])()
SIZE = 8 * strategy.num_replicas_in_sync
with strategy.scope():
    built = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    built.compile("sgd", "mse")


def reduce_a_one():
    with strategy.scope():
        ones = strategy.run(lambda: keras.ops.ones(()))
        return strategy.reduce("SUM", ones, axis=None)


def use(number):
    """Use the strategy in a process that is no rank."""
    own = f"this process is no rank: rank {strategy.rank} has started it"
    x = np.ones((8, 4), "float32")
    for call in (
        lambda: built.fit(x, x[:, :1], verbose=0),
        lambda: built.predict(x, verbose=0),
        reduce_a_one,
    ):
        try:
            call()
        except kt.TowerError as error:
            assert str(error).startswith(own), error
        else:
            raise AssertionError("a child of a rank has used its strategy")
    return [strategy.rank, strategy.size, strategy.local_rank, SIZE]


def main():
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        (found,) = pool.map_async(use, [0]).get(timeout=120)
    assert found == [strategy.rank, 2, strategy.local_rank, 16]
    x = np.full((32, 4), strategy.size, "float32")
    with strategy:
        built.fit(x, x[:, :1], verbose=0)
    print("trained to the end")


if __name__ == "__main__":
    main()
