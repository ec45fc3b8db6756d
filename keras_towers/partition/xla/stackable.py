"""Lists of tensors that pass between functions as a stack.

XLA compiles functions of numbers. A list passes in or out of such a function as
one tensor, the stack of its elements. So the elements must not be lists, and no
function may append to a list that it gets from another one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType

import tensorflow as tf

from keras_towers.partition.ir.called_functions import (
    CalledFunctions,
    functions_of,
)
from keras_towers.partition.ir.effects import LOOPS
from keras_towers.partition.ir.program import (
    Function,
    Operation,
    Program,
    Tensor,
)

_NOTHING: Mapping[Tensor, Tensor] = MappingProxyType({})
_PUSH, _SET = "TensorListPushBack", "TensorListSetItem"
# Their outputs are lists like their inputs.
_LIKE_INPUTS = (
    "AddN",
    "Identity",
    "IdentityN",
    "TensorListResize",
    "ZerosLike",
)


class Stackable:
    """Tells which lists of a program may pass between functions as stacks.

    Args:
        program: the program.
        called: finds the functions that its operations call.
    """

    def __init__(self, program: Program, called: CalledFunctions):
        self._given = {e.result: e.given for e in program.exchanges}
        self._called = called
        self._users = _users_of_lists(program.operations)
        self._inside: dict[Function, Mapping[Tensor, Sequence[Operation]]] = {}
        self._known: dict[Tensor, tf.DType | None] = {}

    def dtype_of(self, tensor: Tensor) -> tf.DType | None:
        """Return the dtype of the elements of a list; None: it has to stay.

        Args:
            tensor: a tensor of dtype ``variant``.
        """
        if tensor not in self._known:
            may_stack = self._becomes(tensor, self._users) is not None
            self._known[tensor] = (
                self._element_dtype(tensor) if may_stack else None
            )
        return self._known[tensor]

    def _element_dtype(
        self, tensor: Tensor, inputs: Mapping[Tensor, Tensor] = _NOTHING
    ) -> tf.DType | None:
        """Return the dtype of a list's tensors; None if it is unknown.

        Args:
            tensor: the list.
            inputs: for each input of the functions around it, what they get.
        """
        operation, index = tensor.operation, tensor.index
        if operation is None:
            source = inputs.get(tensor, self._given.get(tensor))
            return source and self._element_dtype(source, inputs)
        if "element_dtype" in operation.attributes:
            dtype = tf.as_dtype(operation.attributes["element_dtype"].type)
            return None if dtype == tf.variant else dtype
        if operation.type in (*LOOPS, *_LIKE_INPUTS):
            is_alone = len(operation.outputs) == 1
            source = operation.inputs[0 if is_alone else index]
            return self._element_dtype(source, inputs)
        for function in functions_of(operation):
            first = len(operation.inputs) - len(function.inputs)
            given = operation.inputs[first:]
            passed = dict(zip(function.inputs, given, strict=True))
            return self._element_dtype(
                function.outputs[index], {**inputs, **passed}
            )
        return None

    def _becomes(
        self, tensor: Tensor, users: Mapping[Tensor, Sequence[Operation]]
    ) -> set[Tensor] | None:
        """Return the tensors that a list becomes; None: it may grow.

        Args:
            tensor: the list.
            users: for each list of its function, the operations that use it.
        """
        lists: set[Tensor] = set()
        waiting = [tensor]
        while waiting:
            list_ = waiting.pop()
            if list_ in lists:
                continue
            lists.add(list_)
            waiting += [
                r for r, source in self._given.items() if source is list_
            ]
            for operation in users.get(list_, ()):
                after = self._after(operation, list_)
                if after is None:
                    return None
                waiting += after
        return lists

    def _after(
        self, operation: Operation, tensor: Tensor
    ) -> Iterable[Tensor] | None:
        """Return the tensors into which an operation turns a list.

        None: the list may grow.
        """
        is_element = tensor in operation.inputs[1:]
        if operation.type == _PUSH or (operation.type == _SET and is_element):
            return None
        functions = self._called.of(operation)
        if not functions:
            return [t for t in operation.outputs if t.dtype == tf.variant]
        is_loop = operation.type in LOOPS
        inputs = [k for k, t in enumerate(operation.inputs) if t is tensor]
        outputs: set[int] = set(inputs if is_loop else ())
        for index in inputs:
            for function in functions:
                # A branch does not take the first input.
                own = index if is_loop else index - len(operation.inputs)
                ends = self._outputs_from(function, own)
                if ends is None:
                    return None
                outputs |= ends
                # The next round has lists there.
                inputs += [k for k in ends if is_loop and k not in inputs]
        return [operation.outputs[k] for k in outputs]

    def _outputs_from(
        self, function: Function | None, index: int
    ) -> set[int] | None:
        """Return the outputs of a function that an input becomes.

        None: the list may grow.
        """
        if function is None:
            return None
        if function not in self._inside:
            self._inside[function] = _users_of_lists(function.operations)
        lists = self._becomes(function.inputs[index], self._inside[function])
        if lists is None:
            return None
        return {k for k, t in enumerate(function.outputs) if t in lists}


def _users_of_lists(
    operations: Iterable[Operation],
) -> dict[Tensor, list[Operation]]:
    """Return the operations that use each list."""
    users: dict[Tensor, list[Operation]] = {}
    for operation in operations:
        for tensor in operation.inputs:
            if tensor.dtype == tf.variant:
                users.setdefault(tensor, []).append(operation)
    return users
