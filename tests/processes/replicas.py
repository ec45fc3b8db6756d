"""Replicas that train again and again, or differ in number or speed.

A worker; rank 1 of two or rank 2 of three is the slow one.
"""

import contextlib
import json
import os
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
import psutil
import tensorflow as tf

import keras_towers as kt
from keras_towers import tf_config
from keras_towers.sync_replicas import resources
from tests.kit.compare import close
from tests.kit.ranks import check, main
from tests.processes.small import RANK, gather

CLUSTER = tf_config.required()
SIZE = CLUSTER.size
REPETITIONS = int(os.environ.get("REPETITIONS", 4))
WIDTH = 2000
GENERATOR = np.random.default_rng(1)


def rows(count, width=6):
    x = GENERATOR.normal(size=(count, width)).astype("float32")
    return x, x[:, :2] ** 2


def small(optimizer="sgd", kind=keras.Sequential):
    keras.utils.set_random_seed(5)
    layers = [keras.layers.Dense(8, "relu"), keras.layers.Dense(2)]
    made = kind([keras.layers.Input((6,)), *layers])
    made.compile(optimizer, "mse")
    return made


def large():
    """A model of which a server that kept it would show: 8 MB a copy."""
    keras.utils.set_random_seed(5)
    layers = [keras.layers.Dense(WIDTH), keras.layers.Dense(2)]
    made = keras.Sequential([keras.layers.Input((1000,)), *layers])
    made.compile("adam", "mse")
    return made


def memory_of_server():
    """MiB of the job's parameter server, which is on this machine."""

    def serves(process):
        with contextlib.suppress(psutil.Error, ValueError, KeyError):
            told = json.loads(process.environ()[tf_config.VARIABLE])
            return told["task"]["type"] == "ps" and tuple(
                told["cluster"]["ps"]
            ) == tuple(CLUSTER.ps)
        return False

    (server,) = filter(serves, psutil.process_iter())
    return server.memory_info().rss / 2**20


def same(mine, wanted):
    told = gather([w.tobytes() for w in mine.get_weights()])
    assert all(other == told[0] for other in told)
    if RANK == 0:
        for a, b in zip(mine.get_weights(), wanted.get_weights(), strict=True):
            close(a, b)


@check
def trains_exactly_again_and_again():
    x, y = rows(36)
    options = {"batch_size": 12, "epochs": 2, "shuffle": False, "verbose": 0}
    reference = small("adam")
    reference.fit(x, y, **options)
    held = []
    for _ in range(REPETITIONS):
        mine = small("adam")
        with kt.SyncReplicasStrategy() as strategy:
            mine.fit(x, y, **options)
        same(mine, reference)
        if RANK == 0:
            assert strategy.counts.used == (6,) * SIZE
            assert strategy.counts.dropped == (0,) * SIZE
        held.append(len(resources.known()))
    # Those of the last few models only.
    assert held[-1] == held[-2], held


@check
def server_does_not_grow_with_models_strategies_and_optimizers():
    x, y = rows(16, 1000)
    strategy = kt.SyncReplicasStrategy()
    mine = large()
    found = []
    for number in range(3 + 2 * REPETITIONS):
        if number % 3 == 0:
            mine = large()
        elif number % 3 == 1:
            mine.compile("adam", "mse")
        else:
            strategy = kt.SyncReplicasStrategy()
        with strategy:
            mine.fit(x, y, batch_size=8, verbose=0)
        found.append(memory_of_server())
    # Of each fit it would keep two to four copies of 8 MB.
    first, last = found[2], found[-1]
    assert last - first < 12 * (len(found) - 3), found


class Waits(keras.Sequential):
    """A model whose step on the last worker takes until others are ahead."""

    def train_step(self, data):
        def wait():
            if RANK < SIZE - 1:
                return
            until = time.monotonic() + 60
            while not os.path.exists(AHEAD) and time.monotonic() < until:
                time.sleep(0.01)
            assert os.path.exists(AHEAD)

        with tf.control_dependencies([tf.py_function(wait, [], [])]):
            x, y = (tf.identity(part) for part in data)
        return super().train_step((x, y))


AHEAD = "five updates"


class Tell(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        if batch == 5 and RANK == 0:
            with open(AHEAD, "w"):
                pass


@check
def a_late_gradient_that_is_not_a_number_reaches_no_weight():
    slow = RANK == SIZE - 1
    each = [rows(48) for _ in range(SIZE - 1)]
    if slow:
        x, y = (np.full_like(part[:4], np.nan) for part in each[0])
    else:
        x, y = each[RANK]
    mine = small(kind=Waits)
    with kt.SyncReplicasStrategy(SIZE - 1, batches="each") as strategy:
        mine.fit(
            x, y, batch_size=4, shuffle=False, verbose=0, callbacks=[Tell()]
        )
    # Each update is that of one device on a batch of every other worker.
    parts = [
        np.concatenate([part[k].reshape(12, 4, -1) for part in each], 1)
        for k in range(2)
    ]
    wanted = small()
    flat = [part.reshape(-1, part.shape[-1]) for part in parts]
    wanted.fit(*flat, batch_size=4 * (SIZE - 1), shuffle=False, verbose=0)
    same(mine, wanted)
    assert all(np.isfinite(w).all() for w in mine.get_weights())
    if RANK == 0:
        counts = strategy.counts
        assert counts.updates == 12, counts
        assert counts.used == (12,) * (SIZE - 1) + (0,), counts
        assert counts.dropped == (0,) * (SIZE - 1) + (1,), counts


@check
def workers_compute_several_gradients_of_an_update():
    x, y = rows(96)
    mine, wanted = small("adam"), small("adam")
    options = {"epochs": 2, "shuffle": False, "verbose": 0}
    with kt.SyncReplicasStrategy(2 * SIZE) as strategy:
        mine.fit(x, y, batch_size=12, **options)
    wanted.fit(x, y, batch_size=24, **options)
    same(mine, wanted)
    if RANK == 0:
        counts = strategy.counts
        assert counts.updates == 8, counts
        assert counts.used == (16,) * SIZE, counts
        assert counts.dropped == (0,) * SIZE, counts


@check
def backups_train_and_are_counted():
    x, y = rows(240)
    mine = small()
    before = mine.evaluate(x, y, verbose=0)
    pushed = []

    class Count(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            pushed.append(batch)

    with kt.SyncReplicasStrategy(1) as strategy:
        mine.fit(x, y, batch_size=12, epochs=3, verbose=0, callbacks=[Count()])
    same(mine, mine)
    assert mine.evaluate(x, y, verbose=0) < before
    told = gather(len(pushed))
    if RANK == 0:
        counts = strategy.counts
        found = [
            used + dropped
            for used, dropped in zip(counts.used, counts.dropped, strict=True)
        ]
        # The first that has no more data ends the training of all.
        assert max(found) == max(told) == 60, (counts, told)
        for known, number in zip(found, told, strict=True):
            assert known <= number, (counts, told)
        assert sum(counts.used) >= counts.updates > 0, counts


if __name__ == "__main__":
    main()
