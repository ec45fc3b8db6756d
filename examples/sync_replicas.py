"""Train synchronously, without waiting for a slow worker.

``keras-towers run --ps 1 --workers 3 examples/sync_replicas.py``. Each update
averages the first two gradients of three workers. The last worker is slow: most
of its gradients come too late, and are dropped and counted.
"""

import time

import keras
import numpy as np

import keras_towers as kt

STEPS, SLOW_S = 80, 0.2

x = np.random.default_rng(0).random((48 * STEPS, 20), "float32")
y = x.sum(axis=1, keepdims=True)

with kt.SyncReplicasStrategy(replicas_to_aggregate=2) as strategy:
    model = keras.Sequential(
        [keras.Input((20,)), keras.layers.Dense(16), keras.layers.Dense(1)]
    )
    model.compile("adam", "mse")

    def wait(batch, logs):
        # It stands for a slower GPU, a busy machine or a slow disk.
        if strategy.rank == strategy.size - 1:
            time.sleep(SLOW_S)

    slow = keras.callbacks.LambdaCallback(on_train_batch_begin=wait)
    start = time.monotonic()
    model.fit(x, y, batch_size=48, verbose=0, callbacks=[slow])
    seconds = time.monotonic() - start

if strategy.is_chief:
    print(f"{STEPS} steps took {seconds:.1f} s, the slow worker's sleep alone")
    print(f"would have taken {STEPS * SLOW_S:.0f} s. {strategy.counts}")
