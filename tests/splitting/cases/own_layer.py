"""A layer with a call of its own."""

from __future__ import annotations

import keras


class Own(keras.layers.Layer):
    """A layer with one variable and a call of its own."""

    def __init__(self, call, initial=1.0, shape=(), **options):
        super().__init__()
        self.body = call
        self.kept = self.add_weight(
            shape=shape,
            initializer=keras.initializers.Constant(initial),
            **{"trainable": False, "name": "kept", **options},
        )

    def call(self, x):
        return self.body(self, x)

    def compute_output_spec(self, x):
        return keras.KerasTensor(x.shape, x.dtype)
