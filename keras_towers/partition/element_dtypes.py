"""The dtypes of the elements of lists of tensors, which TensorFlow calls variant.

XLA compiles functions of numbers. A list goes from one to another as the stack
of its elements, for which their dtype has to be known.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import tensorflow as tf

from keras_towers.partition.program import Exchange, Tensor
from keras_towers.partition.undivided import LOOPS

_NOTHING: Mapping[Tensor, Tensor] = MappingProxyType({})
# Their outputs are lists like their inputs.
_LIKE_INPUTS = ("AddN", "Identity", "IdentityN", "TensorListResize", "ZerosLike")


class ElementDtypes:
    """Finds the dtypes of the elements of the lists in a program.

    Args:
        exchanges: the exchanges of the program.
    """

    def __init__(self, exchanges: Iterable[Exchange]):
        self._given = {e.result: e.given for e in exchanges}

    def of(
        self, tensor: Tensor, inputs: Mapping[Tensor, Tensor] = _NOTHING
    ) -> Any:
        """Return the dtype of the elements of a list.

        None: it is unknown, it is no list, or its elements are lists.

        Args:
            tensor: the list.
            inputs: for each input of the functions around it, what they get.
        """
        if tensor.dtype != tf.variant:
            return None
        operation, index = tensor.operation, tensor.index
        if operation is None:
            source = inputs.get(tensor, self._given.get(tensor))
            return None if source is None else self.of(source, inputs)
        if "element_dtype" in operation.attributes:
            dtype = tf.as_dtype(operation.attributes["element_dtype"].type)
            return None if dtype == tf.variant else dtype
        if operation.type in (*LOOPS, *_LIKE_INPUTS):
            is_alone = len(operation.outputs) == 1
            return self.of(operation.inputs[0 if is_alone else index], inputs)
        for functions in operation.functions.values():
            called = functions
            if isinstance(called, Sequence):
                called, *_ = called
            first = len(operation.inputs) - len(called.inputs)
            given = zip(called.inputs, operation.inputs[first:], strict=True)
            return self.of(called.outputs[index], {**inputs, **dict(given)})
        return None
