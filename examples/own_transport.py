"""Connect processes by your own transport: through files in a folder.

``keras-towers run -np 2 --no-strategy examples/own_transport.py``
"""

import collections
import pathlib
import tempfile
import threading

import keras
import numpy as np
import tensorflow as tf

from keras_towers import extending


class FolderTransport(extending.EngineTransport):
    name = "a folder"

    def __init__(self):
        job = extending.join_job(self.name)
        super().__init__(job)
        self.folder = pathlib.Path(tempfile.mkdtemp())
        if job.size > 1:  # all ranks use that of rank 0
            job.put(f"folder-{job.rank}", str(self.folder))
            self.folder = pathlib.Path(job.get("folder-0", timeout_s=60))
        self.renew()

    def engine_sum(self, tensors, key):
        each = [self.of_all(t, f"{key}.{n}") for n, t in enumerate(tensors)]
        return [tf.add_n(terms) for terms in each]

    def engine_gather(self, tensor, key):
        return tf.concat(self.of_all(tensor, key), axis=0)

    def of_all(self, tensor, key):
        def exchange(content):
            self.turns[key] += 1  # every step uses the key again
            turn = self.folder / f"{self.round}.{key}.{self.turns[key]}"
            part = turn.with_suffix(f".part{self.rank}")
            part.write_bytes(content)
            part.rename(f"{turn}.{self.rank}")
            return [self.read(f"{turn}.{r}") for r in range(self.size)]

        content, types = tf.io.serialize_tensor(tensor), [tf.string] * self.size
        each = tf.numpy_function(exchange, [content], types)
        return [tf.io.parse_tensor(text, tensor.dtype) for text in each]

    def read(self, name):
        while not pathlib.Path(name).exists():
            assert not self.ended.wait(0.001), "another rank has left"
        return pathlib.Path(name).read_bytes()

    def abort(self):  # the call has failed on another rank: do not wait
        self.ended.set()

    def renew(self):  # all ranks have left their calls: begin again
        self.round = getattr(self, "round", 0) + 1
        self.turns = collections.Counter()
        self.ended = threading.Event()


x = np.random.default_rng(0).random((1000, 20), "float32")
model = keras.Sequential([keras.layers.Dense(1)])
model.compile("adam", "mse")
with extending.ComposedStrategy(transport=FolderTransport()) as strategy:
    model.fit(x, x.sum(axis=1), epochs=2, verbose=2)
    print(strategy.describe())
