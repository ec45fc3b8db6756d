"""In which levels operations find the resources that they use.

What uses the same variable happens in the order of the trace.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from keras_towers.partition.node import Node
from keras_towers.partition.program import Tensor


class ResourceOrder:
    """The times from which on resources may be read, and written.

    A time is twice the level, and one more for what towers do in it: what is
    computed once comes first.

    Attributes:
        copies: of the towers' own handles of variables the common ones.
    """

    def __init__(self) -> None:
        self.copies: dict[Tensor, Tensor] = {}
        self._ready: dict[Any, tuple[int, int]] = {}
        self._least = (0, 0)

    def after(self, node: Node, given: Sequence[Tensor], reads: bool) -> int:
        """Return the level from which on an operation finds its resources.

        Args:
            node: the operation.
            given: its inputs.
            reads: whether it reads resources only.
        """
        ready = [
            self._ready.get(key, self._least) for key in self._keys(node, given)
        ]
        time = max((own[0] if reads else own[1] for own in ready), default=0)
        return (time + 1 - _on_towers(given)) // 2

    def note_use(
        self, node: Node, given: Sequence[Tensor], reads: bool, least: int
    ) -> None:
        """Have what uses the same resources later come behind.

        Args:
            node: the operation that uses them.
            given: its inputs.
            reads: whether it reads resources only.
            least: the level that it has at least.
        """
        level = max([least, *(tensor.level for tensor in given)])
        time = 2 * level + _on_towers(given)
        for key in self._keys(node, given):
            to_read, to_write = self._ready.get(key, self._least)
            to_read = to_read if reads else max(to_read, time)
            self._ready[key] = to_read, max(to_write, time)

    def update(self, handles: list[Any] | None, given: Sequence[Tensor]) -> int:
        """Note an update of variables; return the level at whose end it is.

        Args:
            handles: those of the variables; None: it may be any.
            given: the tensors that it is given.
        """
        keys = list(self._ready) if handles is None else handles
        # Behind what towers do in the level, and behind what may fail: a step
        # whose assertion fails updates nothing.
        before = [
            self._ready.get(key, self._least)[1] // 2 for key in (*keys, None)
        ]
        level = max([*before, *(tensor.level for tensor in given)], default=0)
        behind = 2 * (level + 1), 2 * (level + 1)
        self._ready.update(dict.fromkeys(keys, behind))
        if handles is None:
            self._least = behind
        return level

    def _keys(self, node: Node, given: Sequence[Tensor]) -> list[Any]:
        """The resources that an operation uses; None: what has no name."""
        keys: list[Any] = [
            self.copies.get(t, t) for t in given if t.dtype == tf.resource
        ]
        return keys or ([None] if node.is_stateful else [])


def _on_towers(given: Sequence[Tensor]) -> int:
    """The part of a level in which an operation is done."""
    return int(any(tensor.on_towers for tensor in given))
