"""Operations of a graph, as the rules see them, and their random numbers."""

from __future__ import annotations

from typing import Any

from keras_towers.partition import node
from keras_towers.splitting.values import DoesNotSplit, Rows


class Layouts:
    """The orders of rows of draws that have several for each example.

    A draw of m * n rows says nothing of which of them belong to an example. It
    follows from what it is first combined with, and must hold of every other
    use.
    """

    def __init__(self) -> None:
        self._orders: dict[Any, tuple[int, int]] = {}

    def order(self, draw: Any) -> tuple[int, int] | None:
        """Return blocks and rows of a draw; None before its first use."""
        return self._orders.get(draw)

    def use(self, rows: Rows, outer: int, inner: int) -> None:
        """Rows are combined with others in this order."""
        if rows.draw is None:
            return
        order = outer, inner
        if self._orders.setdefault(rows.draw, order) != order:
            raise DoesNotSplit("uses one draw in two orders of rows")

    def resolved(self, rows: Rows) -> Rows:
        """Return rows whose order is known, by the first use if by none."""
        if rows.draw is None:
            return rows
        order = self._orders.setdefault(rows.draw, (1, rows.count))
        return rows.in_order(*order)


class Node(node.Node):
    """One operation of a traced graph.

    Args:
        operation: the operation.
        layouts: the orders of rows of random numbers.
    """

    def __init__(self, operation: Any, layouts: Layouts):
        super().__init__(operation)
        self.layouts = layouts

    @property
    def is_equal_to_itself(self) -> bool:
        """Whether it asks if a number equals itself, which may be no NaN."""
        return (
            self.type == "Equal"
            and self._inputs[0] is self._inputs[1]
            and not self.dtype(0).is_floating
            and self.static_shape() == ()
        )
