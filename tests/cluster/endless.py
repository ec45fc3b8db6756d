"""Trains until something ends it, in the strategy that its arguments name.

argv: the strategy, or one of ``OPTIONS``, or ``elastic``, and what else befalls
the ranks: ``HOST=EVENT``, where an event is one of ``EVENTS``.
"""

import ctypes
import os
import socket
import sys
import time

import keras
import numpy as np

import keras_towers as kt
from keras_towers.jobs.rendezvous import meet

SLOW_S = 55


def hold_the_lock():
    """Nothing else of Python runs in this process meanwhile."""
    ctypes.PyDLL(None).sleep(SLOW_S)


def die_at_the_start():
    """Behind the meeting, while the others connect."""
    meet.join_job()
    time.sleep(1)
    os._exit(3)


def other_keras():
    keras.__version__ = "3.1.0"


EVENTS = {
    "holds-the-lock": hold_the_lock,
    "is-in-a-callback": lambda: time.sleep(SLOW_S),
    "dies-at-the-start": die_at_the_start,
    "has-another-keras": other_keras,
}
OPTIONS = {"SyncReplicasStrategy:1": {"replicas_to_aggregate": 1}}
AT_THE_START = ("dies-at-the-start", "has-another-keras")


class Report(keras.callbacks.Callback):
    """Reports steps, between which it takes its time."""

    steps = 0

    def on_train_batch_end(self, batch, logs=None):
        self.steps += 1
        time.sleep(0.05)
        if self.steps % 10 == 0:
            print(self.steps, "steps", flush=True)
        if self.steps == 20 and MINE and MINE not in AT_THE_START:
            EVENTS[MINE]()
            print("was slow", flush=True)


def make():
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    return model


def fit(model, *callbacks):
    x = np.random.default_rng(0).normal(size=(640, 3)).astype("float32")
    given = {"callbacks": [Report(), *callbacks], "verbose": 0}
    model.fit(x, x.sum(1, keepdims=True), epochs=10**6, **given)


def go_on():
    """As an elastic job does."""
    from keras_towers import elastic

    model = make()
    state = elastic.State(model)

    @elastic.run
    def train(state):
        with kt.HorovodStrategy():
            fit(model, elastic.Commit(state, every=5))

    train(state)


if __name__ == "__main__":
    NAME, *befalls = sys.argv[1:]
    MINE = dict(one.split("=") for one in befalls).get(socket.gethostname())
    if MINE in AT_THE_START:
        EVENTS[MINE]()
    if NAME == "elastic":
        go_on()
    else:
        strategy = getattr(kt, NAME.partition(":")[0])(**OPTIONS.get(NAME, {}))
        model = make()
        with strategy:
            fit(model)
