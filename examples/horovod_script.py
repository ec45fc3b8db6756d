"""A script written for Horovod.

``keras-towers run -np 2 examples/horovod_script.py``, or ``horovodrun -np 2
python -m keras_towers examples/horovod_script.py``. On Keras 3,
``horovod.keras`` itself reduces no gradients: there, its import gives
``keras_towers.horovod``.
"""

import horovod.keras as hvd
import keras
import numpy as np
import tensorflow as tf

EPOCHS, BATCH_SIZE, RATE = 5, 32, 0.01

hvd.init()
gpus = tf.config.list_physical_devices("GPU")
if gpus:
    tf.config.set_visible_devices(gpus[hvd.local_rank()], "GPU")

# Each process reads its part of the data, the same number of examples.
x = np.random.default_rng(0).random((1280, 20), "float32")
y = x.sum(axis=1, keepdims=True)
shard = slice(hvd.rank(), None, hvd.size())

model = keras.Sequential(
    [keras.Input((20,)), keras.layers.Dense(64, "relu"), keras.layers.Dense(1)]
)
optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(RATE * hvd.size()))
model.compile(optimizer, "mse", metrics=["mae"])

callbacks = [
    hvd.callbacks.BroadcastGlobalVariablesCallback(0),
    hvd.callbacks.MetricAverageCallback(),
    hvd.callbacks.LearningRateWarmupCallback(RATE * hvd.size(), 2),
]
if hvd.rank() == 0:
    callbacks.append(keras.callbacks.ModelCheckpoint("model.keras"))

model.fit(
    x[shard],
    y[shard],
    batch_size=BATCH_SIZE,
    epochs=EPOCHS,
    callbacks=callbacks,
    verbose=2 if hvd.rank() == 0 else 0,
)
if hvd.rank() == 0:
    # The file names Keras's own classes: no Horovod is needed to load it.
    loss, error = keras.models.load_model("model.keras").evaluate(x, y)
    print(f"mean absolute error of the saved model: {error:.3f}")
