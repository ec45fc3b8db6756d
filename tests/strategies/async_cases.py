"""Layers and data for the tests of asynchronous towers."""

import threading
import time
from collections.abc import Callable

import keras
import tensorflow as tf

from tests.kit.training import X, Y


def dataset() -> tf.data.Dataset:
    """``X`` and ``Y`` in seven batches."""
    return tf.data.Dataset.from_tensor_slices((X, Y)).batch(8)


def within(seconds: float, function: Callable[[], None]) -> None:
    """Call a function, and fail rather than hang where it takes longer."""
    errors = []

    def call():
        try:
            function()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(seconds)
    assert not thread.is_alive(), f"not done after {seconds} s"
    for error in errors:
        raise error


class SameShape(keras.layers.Layer):
    """A layer whose ``call`` is not run when a model is built."""

    def compute_output_spec(self, inputs):
        return keras.KerasTensor(inputs.shape, inputs.dtype)


class Sleeps(SameShape):
    """Takes so many seconds on each tower, and notes whose turn it was."""

    def __init__(self, *seconds):
        super().__init__()
        self.seconds = seconds
        self.steps = [0] * len(seconds)

    def call(self, inputs):
        tower = int(tf.identity(inputs).device.rsplit(":", 1)[1])

        def wait(values):
            self.steps[tower] += 1
            time.sleep(self.seconds[tower])
            return values

        outputs = tf.py_function(wait, [inputs], inputs.dtype)
        return tf.ensure_shape(outputs, inputs.shape)
