"""What is computed once in a level, as functions and single operations in turn.

XLA compiles functions of numbers. What uses variables, files or strings stays
outside of them, and may need their results, or they may need its.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow as tf

from keras_towers.partition.effects import is_draw
from keras_towers.partition.folding import LARGEST
from keras_towers.partition.program import Operation, Tensor

_NOT_NUMBERS = (tf.string, tf.resource, tf.variant)


@dataclasses.dataclass(frozen=True, eq=False)
class Stage:
    """A part of a level: operations of a function, then single ones.

    Attributes:
        compiled: the operations of the function, in order.
        single: the operations that follow it, in order.
    """

    compiled: list[Operation] = dataclasses.field(default_factory=list)
    single: list[Operation] = dataclasses.field(default_factory=list)


def stages_of(operations: Sequence[Operation]) -> list[Stage]:
    """Divide operations of a level into as few stages as possible.

    Args:
        operations: N operations that are computed once, in order.
    """
    numbers: dict[int, int] = {}
    compiled = {id(o) for o in operations if _is_of_numbers(o)}
    # The last stages that read and that wrote a resource.
    read: dict[Any, int] = {}
    written: dict[Any, int] = {}
    stages: list[Stage] = []
    for operation in operations:
        is_compiled = id(operation) in compiled
        number = 0
        for source in _sources(operation):
            if id(source) in numbers:
                # A function comes before the single operations of its stage.
                is_later = is_compiled and id(source) not in compiled
                number = max(number, numbers[id(source)] + int(is_later))
        if not is_compiled:
            reads = not operation.has_effect
            for key in _resources(operation):
                number = max(number, written.get(key, 0))
                if not reads:
                    number = max(number, read.get(key, 0))
            for key in _resources(operation):
                (read if reads else written)[key] = number
        numbers[id(operation)] = number
        while len(stages) <= number:
            stages.append(Stage())
        stage = stages[number]
        (stage.compiled if is_compiled else stage.single).append(operation)
    return stages


def needs_call(operations: Sequence[Operation]) -> bool:
    """Whether operations have to be called as a function, or gain by it.

    A call takes longer than some operations on single numbers. But XLA draws
    other numbers than TensorFlow, and functions may do so.
    """
    draws = any(is_draw(o.type) or _calls_functions(o) for o in operations)
    outputs = [tensor for o in operations for tensor in o.outputs]
    sizes = [tensor.shape.num_elements() for tensor in outputs]
    return draws or any(n is None or n > LARGEST for n in sizes)


def _calls_functions(operation: Operation) -> bool:
    """Whether an operation calls functions, of the program or of the trace."""
    if operation.functions:
        return True
    values = operation.attributes.values()
    return any(value.HasField("func") or value.list.func for value in values)


def _is_of_numbers(operation: Operation) -> bool:
    """Whether a function of numbers may contain an operation."""
    if operation.has_effect or operation.at_root:
        return False
    tensors = (*operation.inputs, *operation.outputs)
    return all(tensor.dtype not in _NOT_NUMBERS for tensor in tensors)


def _resources(operation: Operation) -> list[Any]:
    """Return the handles that an operation uses; None: any other resource."""
    return [t for t in operation.inputs if t.dtype == tf.resource] or [None]


def _sources(operation: Operation) -> Iterator[Operation]:
    """Yield the operations whose results an operation uses.

    Repeated operations are parts of those that use them.
    """
    waiting: list[Tensor] = list(operation.inputs)
    seen: set[Tensor] = set()
    while waiting:
        tensor = waiting.pop()
        source = tensor.operation
        if source is None or tensor in seen:
            continue
        seen.add(tensor)
        if source.is_repeated:
            waiting += source.inputs
        else:
            yield source
