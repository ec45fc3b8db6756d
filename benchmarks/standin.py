"""Ranks for ``scaling.py``: stand-ins, and such as train.

A stand-in meets the others, is compared and watched, and does not import
TensorFlow, so that many fit on a machine. Each line of its stdin is what it
waits in from then on; empty: nothing. With the name of a strategy, a rank
trains in it until it is ended.
"""

from __future__ import annotations

import os
import sys
import time

from keras_towers.rendezvous import check, meet, store, watch

STEPS = 5
"""Steps between two lines of output of a rank that trains."""


def train(strategy: str) -> None:
    """Train a model of 1 MB of weights without end."""
    import keras
    import numpy as np

    import keras_towers as kt

    class Tell(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: object = None) -> None:
            if batch % STEPS == 0:
                print("steps", flush=True)

    with getattr(kt, strategy)():
        layers = [keras.layers.Dense(256) for _ in range(4)]
        model = keras.Sequential([keras.Input((256,)), *layers])
        model.compile("sgd", "mse")
        x = np.zeros((32000, 256), "float32")
        given = {"callbacks": [Tell()], "verbose": 0, "epochs": 10**6}
        model.fit(x, x, **given)


def main() -> None:
    """Take part in a job until stdin is closed, or for some seconds."""
    meet.join()
    check.introduce("")
    rank, size = (int(os.environ[f"HOROVOD_{n}"]) for n in ("RANK", "SIZE"))
    store.tell_connected(rank)
    watch.watch_over(rank, size)
    print("met", rank, flush=True)
    time.sleep(float(*sys.argv[1:] or "0"))
    for line in sys.stdin:
        watch.mark(line.strip())


if __name__ == "__main__":
    if "Strategy" in sys.argv[-1]:
        train(sys.argv[-1])
    else:
        main()
