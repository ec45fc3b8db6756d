"""Layers and data for the tests of towers that do not wait for each other."""

import threading

import keras
import numpy as np
import tensorflow as tf

from tests.kit.leaving import Boom
from tests.kit.training import BATCH, X, Y

TARGETS = (Y == 1).astype("float32")[:, None]


def dataset() -> tf.data.Dataset:
    """``X`` and ``Y`` in seven batches."""
    return tf.data.Dataset.from_tensor_slices((X, Y)).batch(8)


class Pieces(keras.utils.PyDataset):
    def __len__(self):
        return 5

    def __getitem__(self, index):
        return X[index : index + 8], Y[index : index + 8]


def _generator():
    while True:
        yield X[:8], Y[:8]


# What ``fit`` is given, and the number of batches of an epoch.
SOURCES = {
    "arrays": (lambda: {"x": X, "y": Y, "batch_size": 16}, 4),
    "one batch": (lambda: {"x": X, "y": Y, "batch_size": 64}, 1),
    "dataset": (lambda: {"x": dataset()}, 7),
    "unknown length": (lambda: {"x": dataset().filter(lambda *_: True)}, 7),
    "some steps": (lambda: {"x": dataset().repeat(), "steps_per_epoch": 4}, 4),
    "generator": (lambda: {"x": _generator(), "steps_per_epoch": 6}, 6),
    "PyDataset": (lambda: {"x": Pieces()}, 5),
}


def fits(model, name, then):
    """``fit`` for an epoch and for two; then look, given the batches."""
    make, batches = SOURCES[name]
    for epochs in (1, 2):
        model.fit(**make(), epochs=epochs, verbose=0)
        then(epochs, batches)
    return 3 * batches


def endless(model, steps, **options):
    """``fit`` with epochs of so many batches of eight examples."""
    data = dataset().repeat()
    return model.fit(data, steps_per_epoch=steps, verbose=0, **options).history


callback = keras.callbacks.LambdaCallback


def tower_of(inputs) -> int | None:
    """The index of the tower for which this is traced, if any."""
    device = tf.identity(inputs).device
    return int(device.rsplit(":", 1)[1]) if "CPU" in device else None


class Traced(keras.layers.Layer):
    """Calls a function with each tower that is traced.

    Its ``call`` is not run when a model is built.
    """

    def __init__(self, function):
        super().__init__()
        self.function = function

    def compute_output_spec(self, inputs, training=False):
        return keras.KerasTensor(inputs.shape, inputs.dtype)

    def call(self, inputs):
        if (tower := tower_of(inputs)) is not None:
            self.function(tower)
        return inputs


class Runs(Traced):
    """Gives what a function makes of a tower and its batch, in each step."""

    def call(self, inputs):
        tower = tower_of(inputs)
        outputs = tf.py_function(
            lambda values: self.function(tower, values), [inputs], inputs.dtype
        )
        return tf.ensure_shape(outputs, inputs.shape)


class Late(Runs):
    """The third step ends only when others have begun so many more.

    Which tower is the late one is known only then.

    Args:
        others: number of steps of the others.
        factor: what the late tower multiplies its batch with.

    Attributes:
        begun: the tower of each step, in the order of their begin.
        held_nobody: whether the others did not wait.
    """

    def __init__(self, others, factor=1.0):
        super().__init__(self.step)
        self.factor = factor
        self.begun = []
        self.held_nobody = False
        self._others = others
        self._enough = threading.Event()
        self._turn = threading.Lock()

    @property
    def late(self):
        return self.begun[2]

    def step(self, tower, values):
        with self._turn:
            number = len(self.begun)
            self.begun.append(tower)
        if number >= 2 + self._others:
            self._enough.set()
        if number != 2:
            return values
        self.held_nobody = self._enough.wait(60)
        return values * self.factor


def refuse(tower, values):
    """For a layer that cannot run where its inputs are not numbers."""
    if not np.isfinite(values.numpy()).all():
        raise Boom("not a number")
    return values


def some_bad(at):
    """``X`` whose batch of this number is not a number."""
    x = X.copy()
    x[at * BATCH] = np.nan
    return x


def written(folder) -> dict[tuple[str, int], np.ndarray]:
    """What a TensorBoard callback has written, by tag and step."""
    return {
        (value.tag, event.step): tf.make_ndarray(value.tensor)
        for file in sorted(folder.glob("train/*"))
        for event in tf.compat.v1.train.summary_iterator(str(file))
        for value in event.summary.value
    }


def order_free(optimizer, **kwargs):
    """A model whose gradients do not depend on its weights.

    So the sum of all updates is the same in every order.
    """
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(3)])
    model.compile(optimizer, lambda y, out: out * y, **kwargs)
    return model
