"""Which lists of a loop have the same tensors in memory.

The backward pass of a loop needs results of each round, which the forward pass
appends to lists. An element is no copy. So a result that is appended to several
lists is in memory once, as is the state of a loop, which is appended as the
result of one round and the input of the next one::

    state: input 1, result of round 1 (input 2), result of round 2 (input 3)
"""

from __future__ import annotations

from collections.abc import Mapping

from keras_towers.partition.ir.builder import NEW_LISTS
from keras_towers.partition.ir.program import Function, Operation, Tensor
from keras_towers.partition.ir.registry import facts_of

_PUSH = "TensorListPushBack"
# The input of an operation that it adds to a list.
_ADDED = {_PUSH: 1, "TensorListSetItem": 2}


def shared_lists(loop: Operation) -> Mapping[Tensor, Tensor]:
    """Return the lists that a loop makes of tensors that are in memory anyway.

    Args:
        loop: the loop.

    Returns:
        For each list the one that has its elements, too: another result of the
        loop, or what the loop is given.
    """
    body = loop.functions.get("body")
    if not isinstance(body, Function):
        return {}
    # Inputs that are the same in all rounds may be tensors outside of the body.
    inside = map(source_of, body.inputs)
    owners = dict(zip(inside, loop.inputs, strict=True))
    elements: dict[Tensor, Tensor] = {}
    for given, list_, result in zip(
        loop.inputs, loop.outputs, body.outputs, strict=True
    ):
        added, first = source_of(result).operation, source_of(given).operation
        if not (added and first and first.type in NEW_LISTS):
            continue
        if added.type in _ADDED:
            element = added.inputs[_ADDED[added.type]]
            elements[list_] = _home_of(element, body)
        # It has the elements of all rounds.
        if added.type == _PUSH:
            owners.setdefault(elements[list_], list_)
    return {
        list_: owners[element]
        for list_, element in elements.items()
        if owners.get(element, list_) is not list_
    }


def popped_lists(loop: Operation) -> list[Tensor]:
    """Return the lists of which a loop removes elements, round by round."""
    body = loop.functions.get("body")
    if not isinstance(body, Function):
        return []
    popped = {
        source_of(operation.inputs[0])
        for operation in body.operations
        if operation.type == "TensorListPopBack"
    }
    pairs = zip(body.inputs, loop.inputs, strict=True)
    return [given for inside, given in pairs if source_of(inside) in popped]


def source_of(tensor: Tensor) -> Tensor:
    """Return the tensor whose memory another one of its function has."""
    operation = tensor.operation
    while operation and facts_of(operation.type).memory == "input":
        tensor = operation.inputs[tensor.index]
        operation = tensor.operation
    return tensor


def _home_of(tensor: Tensor, body: Function) -> Tensor:
    """Return the tensor of a body in whose memory another one is.

    An input of the body stands for what is the same in all rounds, such as a
    list that has all elements.
    """
    returned = dict(zip(map(source_of, body.inputs), body.outputs, strict=True))
    seen: set[Tensor] = set()
    while True:
        tensor = source_of(tensor)
        operation = tensor.operation
        if operation and operation.type == "TensorListGetItem":
            list_ = source_of(operation.inputs[0])
            if list_ in returned and source_of(returned[list_]) is list_:
                return list_
        if tensor not in returned or tensor in seen:
            return tensor
        # It is what the round before has returned.
        seen.add(tensor)
        tensor = returned[tensor]
