"""Computes late what nobody needs early, so that less is kept in between.

The backward pass begins with what it makes of values of the forward pass, such
as their distance from a mean. Made where these are, it would be kept for each
layer beside them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from keras_towers import compat
from keras_towers.partition.program import (
    Exchange,
    Operation,
    Tensor,
    Update,
)


def delayed(
    operations: Sequence[Operation],
    exchanges: Iterable[Exchange],
    updates: Iterable[Update],
    results: Iterable[Tensor],
) -> None:
    """Move operations of towers to the levels that need them.

    Args:
        operations: the operations, in their order.
        exchanges: the exchanges, which stay where they are.
        updates: the updates, whose gradients are there as soon as possible.
        results: what was asked for.
    """
    uses: dict[Tensor, set[int]] = {}

    def use(tensors: Iterable[Tensor], levels: Iterable[int]) -> None:
        for tensor in tensors:
            uses.setdefault(tensor, set()).update(levels)

    for exchange in exchanges:
        use([exchange.given], [exchange.given.level])
    for tensor in [*results, *(t for u in updates for t in u.given)]:
        use([tensor], [tensor.level])
    for operation in reversed(operations):
        levels = {n for t in operation.outputs for n in uses.get(t, ())}
        if operation.is_repeated:
            use(operation.inputs, levels)
            continue
        level = min(levels, default=operation.level)
        if level > operation.level and _may_wait(operation, level, uses):
            operation.level = level
            for tensor in operation.outputs:
                tensor.level = level
        use(operation.inputs, [operation.level])


def _may_wait(
    operation: Operation, level: int, uses: dict[Tensor, set[int]]
) -> bool:
    """Whether an operation may be done later without keeping more for it."""
    definition = compat.op_definition(operation.type)
    if (
        not operation.on_towers
        or operation.has_effect
        or operation.functions
        or definition is None
        or definition.is_stateful
    ):
        return False
    return all(
        not tensor.on_towers
        or (tensor.operation is not None and tensor.operation.is_repeated)
        or max(uses.get(tensor, ()), default=-1) >= level
        for tensor in operation.inputs
    )
