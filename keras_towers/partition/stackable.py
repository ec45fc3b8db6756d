"""Lists of tensors that go from one function to another as a stack.

XLA compiles functions of numbers: what they take and return of a list are its
elements, as the rows of a tensor. So the elements must not be lists, and no
function may append to a list that it has from another one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import tensorflow as tf

from keras_towers.partition.kernels import called_names, functions_of
from keras_towers.partition.program import (
    Function,
    Operation,
    Program,
    Tensor,
)

_NOTHING: Mapping[Tensor, Tensor] = MappingProxyType({})
_LOOPS = ("While", "StatelessWhile")
_SETS = ("TensorListPushBack", "TensorListSetItem")
# Their outputs are lists like their inputs.
_LIKE_INPUTS = ("AddN", "Identity", "IdentityN", "TensorListResize", "ZerosLike")


class Stackable:
    """Tells which lists of a program may go from one function to another.

    Args:
        program: the program.
    """

    def __init__(self, program: Program):
        self._given = {e.result: e.given for e in program.exchanges}
        self._users = _users_of_lists(program.operations)
        self._inside: dict[int, Mapping[Tensor, Any]] = {}
        self._known: dict[Tensor, Any] = {}

    def dtype_of(self, tensor: Tensor) -> Any:
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
    ) -> Any:
        """Return the dtype of elements; None: unknown, or they are lists.

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
        if operation.type in (*_LOOPS, *_LIKE_INPUTS):
            is_alone = len(operation.outputs) == 1
            source = operation.inputs[0 if is_alone else index]
            return self._element_dtype(source, inputs)
        for function in functions_of(operation):
            given = zip(*_passed(operation, function), strict=True)
            result = function.outputs[index]
            return self._element_dtype(result, {**inputs, **dict(given)})
        return None

    def _becomes(
        self, tensor: Tensor, users: Mapping[Tensor, Sequence[Operation]]
    ) -> set[Tensor] | None:
        """Return what becomes of a list; None: it may grow.

        Args:
            tensor: the list.
            users: for each list of its function, the operations that use it.
        """
        found: set[Tensor] = set()
        waiting = [tensor]
        while waiting:
            one = waiting.pop()
            if one in found:
                continue
            found.add(one)
            waiting += [r for r, given in self._given.items() if given is one]
            for operation in users.get(one, ()):
                after = self._after(operation, one)
                if after is None:
                    return None
                waiting += after
        return found

    def _after(
        self, operation: Operation, tensor: Tensor
    ) -> Iterable[Tensor] | None:
        """Return what an operation makes of a list; None: it may grow."""
        is_element = tensor in operation.inputs[1:]
        if operation.type in _SETS and is_element:
            return None
        # What functions do that were not laid out is not known here.
        grows = operation.type == "TensorListPushBack"
        if grows or called_names(operation.attributes):
            return None
        functions = functions_of(operation)
        if not functions:
            return [t for t in operation.outputs if t.dtype == tf.variant]
        is_loop = operation.type in _LOOPS
        inside = [t is tensor for t in operation.inputs]
        after: set[Tensor] = set()
        is_settled = False
        while not is_settled:
            is_settled = True
            for function in functions:
                first = len(operation.inputs) - len(function.inputs)
                taken = inside[first:]
                own = [t for t, is_it in zip(function.inputs, taken) if is_it]
                for one in own:
                    made = self._becomes(one, self._users_in(function))
                    if made is None:
                        return None
                    if len(function.outputs) != len(operation.outputs):
                        # It is the condition of a loop.
                        continue
                    for index, result in enumerate(function.outputs):
                        if result not in made:
                            continue
                        after.add(operation.outputs[index])
                        if is_loop and not inside[index]:
                            # The next round has it there.
                            inside[index], is_settled = True, False
        if is_loop:
            pairs = zip(operation.outputs, inside, strict=True)
            after.update(made for made, is_it in pairs if is_it)
        return after

    def _users_in(self, function: Function) -> Mapping[Tensor, Any]:
        if id(function) not in self._inside:
            found = _users_of_lists(function.operations)
            self._inside[id(function)] = found
        return self._inside[id(function)]


def _passed(
    operation: Operation, function: Function
) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
    """Return the inputs of a function, and what an operation gives it."""
    first = len(operation.inputs) - len(function.inputs)
    return function.inputs, operation.inputs[first:]


def _users_of_lists(
    operations: Iterable[Operation],
) -> dict[Tensor, list[Operation]]:
    """Return for each list the operations that use it."""
    users: dict[Tensor, list[Operation]] = {}
    for operation in operations:
        for tensor in operation.inputs:
            if tensor.dtype == tf.variant:
                users.setdefault(tensor, []).append(operation)
    return users
