"""A worker or server that trains slowly, and tells how far it is."""

import json
import os
import sys
import time

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"

import keras
import numpy as np

import keras_towers as kt
from keras_towers.fit.served import workers
from keras_towers.parameter_servers import pulse, server, shared

pulse._GONE_S = server._GONE_S = workers._QUIET_S = 2.0
server._CHIEF_GONE_S = 6.0
shared._ANSWER_S = 5.0
NAME, OPTIONS, EPOCHS = sys.argv[1], json.loads(sys.argv[2]), sys.argv[3]
kt.virtual_towers(2)
# The server's devices are no towers of this process.
strategy = getattr(kt, NAME)(**{"towers": 1, **OPTIONS})


class Tell(keras.callbacks.Callback):
    """Writes when each step ends."""

    def on_train_batch_end(self, batch, logs=None):
        print("step", time.time(), int(self.model.optimizer.iterations))
        time.sleep(0.05)

    def on_epoch_begin(self, epoch, logs=None):
        print("epoch", epoch)


keras.utils.set_random_seed(3)
model = keras.Sequential([keras.layers.Input((8,)), keras.layers.Dense(1)])
model.compile(keras.optimizers.SGD(0.01), "mse")
x = np.random.default_rng(0).normal(size=(96, 8)).astype("float32")
try:
    with strategy:
        for number, epochs in enumerate(json.loads(EPOCHS)):
            print("fit of", epochs)
            model.fit(
                *(x, x[:, :1], 8),
                initial_epoch=number,
                epochs=number + epochs,
                verbose=0,
                callbacks=[Tell()],
            )
except kt.TowerError as error:
    print(f"refused at {time.time()}: {error}")
    raise
print("weights", [w.tobytes().hex()[:16] for w in model.get_weights()])
print("values", json.dumps([w.tolist() for w in model.get_weights()]))
print("counts", getattr(strategy, "counts", None))
