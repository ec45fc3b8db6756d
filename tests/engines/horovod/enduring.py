"""A script for ``horovod.keras`` with only its import changed, disturbed.

argv: a folder. A worker leaves a file with its process's number in the folder
``workers`` when it trains, and rank 0 a line in ``steps`` for every batch.
"""

import os
import pathlib
import sys
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np

from keras_towers import horovod as hvd

FOLDER = pathlib.Path(sys.argv[1])
EPOCHS, STEPS, EVERY = 3, 12, 5

hvd.init()
generator = np.random.default_rng(hvd.rank())
x = generator.normal(size=(8 * STEPS, 4)).astype("float32")
model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])
optimizer = hvd.DistributedOptimizer(keras.optimizers.Adam(0.02 * hvd.size()))
model.compile(loss="mse", optimizer=optimizer)


def on_state_reset():
    optimizer.learning_rate.assign(0.02 * hvd.size())


state = hvd.elastic.KerasState(model, batch=0, epoch=0)
state.register_reset_callbacks([on_state_reset])


class Log(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        (FOLDER / "workers" / str(os.getpid())).touch()
        time.sleep(0.1)
        if hvd.rank() == 0:
            place = state.epoch * STEPS + state.batch
            with (FOLDER / "steps").open("a") as file:
                print(hvd.size(), place, int(optimizer.iterations), file=file)


@hvd.elastic.run
def train(state):
    model.fit(
        x,
        x[:, :3],
        8,
        epochs=EPOCHS - state.epoch,
        callbacks=[
            hvd.elastic.CommitStateCallback(state, batches_per_commit=EVERY),
            hvd.elastic.UpdateBatchStateCallback(state),
            hvd.elastic.UpdateEpochStateCallback(state),
            Log(),
        ],
        verbose=0,
    )


(FOLDER / "workers").mkdir(exist_ok=True)
train(state)
weights = hvd.allgather_object(
    [variable.numpy() for variable in model.weights + optimizer.variables]
)
for others in weights:
    for one, other in zip(weights[0], others, strict=True):
        np.testing.assert_array_equal(one, other)
print(f"{hvd.size()} ranks are equal after {state.epoch} epochs", flush=True)
