"""Gives back to the system what building a step has freed.

TensorFlow optimizes a step when it first runs, and frees most of what it used.
The C library keeps that for small blocks only; tensors would need more.
"""

from __future__ import annotations

import numpy as np
import tensorflow as tf

from keras_towers.foundation import compat, system
from keras_towers.foundation.object_types import Structure


class HeapTrim:
    """Trims the heap once after each trace, before the step's first tensors."""

    def __init__(self) -> None:
        self._is_due = compat.hidden_variable(False)

    def before_step(self, batch: Structure) -> Structure:
        """Return the batch of a step that is traced, once the heap is trimmed.

        The step waits in no other way: TensorFlow, which fuses convolutions by
        oneDNN, ends the process if one waits for more than its inputs.
        """
        leaves = tf.nest.flatten(batch, expand_composites=True)
        tensors = [leaf for leaf in leaves if tf.is_tensor(leaf)]
        if compat.in_xla_context(compat.get_default_graph()) or not tensors:
            return batch
        with tf.init_scope():
            self._is_due.assign(True)

        def trim() -> np.ndarray:
            system.return_freed_memory()
            return np.array(False)

        def first() -> list[tf.Tensor]:
            is_due = tf.numpy_function(trim, [], tf.bool)
            with tf.control_dependencies([self._is_due.assign(is_due)]):
                return [tf.identity(tensor) for tensor in tensors]

        later = iter(tf.cond(self._is_due, first, lambda: tensors))
        packed = [next(later) if tf.is_tensor(t) else t for t in leaves]
        return tf.nest.pack_sequence_as(batch, packed, expand_composites=True)
