"""The sizes and entries that tensors of a program have for an assumed batch.

Whether XLA compiles a function depends on them: an image must not be smaller
than a kernel, and a shape has to be a constant.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from keras_towers.partition.layouts import Sharded
from keras_towers.partition.program import Inputs, Tensor
from keras_towers.partition.sizes import (
    EXAMPLES,
    ONE_MORE,
    Size,
    is_data_dependent,
    symbol_name,
)


@dataclasses.dataclass(frozen=True)
class AssumedBatch:
    """A batch in which every tower has the same number of examples.

    Attributes:
        towers: the number of towers, or of their micro-batches.
        rows: the number of examples of each of them, and any size that is not
            known.
    """

    towers: int
    rows: int

    def inputs_of(
        self, inputs: Inputs, tensors: Sequence[Tensor]
    ) -> list[tf.TensorSpec | np.ndarray]:
        """Return the specs, or the entries, that tensors have in a function.

        Args:
            inputs: the inputs of the program.
            tensors: N tensors, whose ranks are known.
        """
        known = {
            inputs.total: self._number(EXAMPLES),
            inputs.start: 0,
            inputs.is_first: True,
            **dict.fromkeys(inputs.sizes.values(), self.rows),
        }
        return [
            np.asarray(known[tensor], tensor.dtype.as_numpy_dtype)
            if tensor in known
            else self._input(tensor)
            for tensor in tensors
        ]

    def _input(self, tensor: Tensor) -> tf.TensorSpec | np.ndarray:
        entries = self._entries(tensor)
        if entries is not None:
            return entries
        sizes: list[Any] = [
            self.rows if size is None else size for size in tensor.shape
        ]
        value = tensor.value
        if value is not None and len(value.shape or ()) == len(sizes):
            for axis, size in enumerate(value.shape):
                found = self._number(size)
                if isinstance(found, int) and tensor.shape[axis] is None:
                    sizes[axis] = found
            layout = value.layout
            if tensor is value.local and isinstance(layout, Sharded):
                sizes[layout.axis] = layout.rows_per_unit * self._own(layout)
        return tf.TensorSpec(sizes, tensor.dtype)

    def _own(self, layout: Sharded) -> int:
        """Return the number of units that a tower has."""
        number = self._number(layout.unit.size)
        return -(-number // self.towers) if isinstance(number, int) else 1

    def _entries(self, tensor: Tensor) -> np.ndarray | None:
        """Return the entries of integers, if all of them follow from sizes."""
        value = tensor.value
        known = None if value is None else value.known
        if known is None or not tensor.dtype.is_integer:
            return None
        numbers = [self._number(entry) for entry in np.ravel(known)]
        if not all(isinstance(number, int) for number in numbers):
            return None
        array = np.asarray(numbers, tensor.dtype.as_numpy_dtype)
        return array.reshape(np.shape(known))

    def _number(self, size: Any) -> Any:
        """Return a size; None: it is not known."""
        if isinstance(size, (int, np.integer)):
            return int(size)
        if not isinstance(size, Size):
            return None
        total = self.rows * self.towers
        if size == ONE_MORE:
            return total + 1
        factors = [
            (total if self._grows(name) else self.rows) ** power
            for name, power in size.powers
        ]
        return size.number * math.prod(factors)

    def _grows(self, name: str) -> bool:
        """Whether a symbol is the sum of sizes of all towers."""
        symbol = Size(1, ((name, 1),))
        return name == symbol_name(EXAMPLES) or is_data_dependent(symbol)
