"""Gives back to the system what building a step has freed.

TensorFlow optimizes a step when it first runs, and frees most of what it used.
The C library keeps that for small blocks only; tensors would need more.
"""

from __future__ import annotations

import numpy as np
import tensorflow as tf

from keras_towers import compat, system


class HeapTrim:
    """Trims the heap once after each trace, before the step's first tensors."""

    def __init__(self) -> None:
        self._is_due = compat.hidden_variable(False)

    def before_step(self) -> list[tf.Tensor]:
        """Return what the step that is traced must wait for."""
        if compat.in_xla_context(compat.get_default_graph()):
            return []
        with tf.init_scope():
            self._is_due.assign(True)

        def trim() -> np.ndarray:
            system.return_freed_memory()
            return np.array(False)

        def first() -> tf.Tensor:
            is_due = tf.numpy_function(trim, [], tf.bool)
            with tf.control_dependencies([self._is_due.assign(is_due)]):
                return tf.identity(is_due)

        return [tf.cond(self._is_due, first, lambda: tf.constant(False))]
