"""Whether towers that trace a step by themselves trace the same.

The analysis is of one trace. A number that Python draws, or an object that
remembers how often it was asked, makes the next trace another one.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from keras_towers import compat
from keras_towers.fit.capture.capture import Captured, capture
from keras_towers.fit.context.tower import Tower
from keras_towers.fit.contract import UpdateCall

# What is given to a trace, and orders its operations.
_PASSED_OVER = frozenset(("Placeholder", "NoOp"))


@dataclasses.dataclass(frozen=True)
class Other:
    """Where a tower's trace is another than that of tower 0.

    Attributes:
        text: what it does: "uses another constant on tower 1 than on tower 0".
        operation: the operation, or None.
    """

    text: str
    operation: Any


class OwnTraces:
    """Compares what towers trace before their first update.

    Towers that exchange values before trace at the same time, and are not
    compared.

    Args:
        differs: told where a tower's trace is another.
    """

    def __init__(self, differs: Callable[[Other], None]):
        self._differs = differs
        self._first: list[tuple[Any, str, bytes]] | None = None
        self._tracing = 0
        self._mixed = False

    def capture(
        self,
        step: Callable[[Any], Any],
        data: Any,
        tower: Tower,
        at_update: Callable[[UpdateCall], Any],
    ) -> Captured:
        """Run a step on a tower, as ``capture`` does, and compare its trace."""
        self._mixed |= self._tracing > 0
        self._tracing += 1
        begin = len(compat.get_default_graph().get_operations())
        compared = False

        def compare() -> None:
            nonlocal compared
            if not compared:
                compared = True
                self._tracing -= 1
                self._compare(begin, tower.index)

        def update(call: UpdateCall) -> Any:
            compare()
            return at_update(call)

        captured = capture(step, data, tower, update)
        compare()
        return captured

    def _compare(self, begin: int, index: int) -> None:
        if self._mixed:
            return
        graph = compat.get_default_graph()
        mine = list(_described(graph.get_operations()[begin:]))
        if self._first is None:
            self._first = mine
            return
        nothing = None, "", b""
        for one, other in itertools.zip_longest(
            self._first, mine, fillvalue=nothing
        ):
            if one[1:] == other[1:]:
                continue
            what = "constant" if one[1] == other[1] else "operation"
            text = f"has another {what} on tower {index} than on tower 0"
            self._differs(Other(text, other[0] or one[0]))
            return


def _described(operations: Iterable[Any]) -> Iterator[tuple[Any, str, bytes]]:
    """Yield operations with their types, and the values of constants."""
    for operation in operations:
        if operation.type in _PASSED_OVER:
            continue
        definition = operation.node_def
        value = b""
        if operation.type == "Const":
            value = definition.attr["value"].SerializeToString()
        yield operation, operation.type, value
        for attribute in definition.attr.values():
            for function in (attribute.func, *attribute.list.func):
                if function.name:
                    graph = compat.graph_of_function(
                        operation.graph, function.name
                    )
                    if graph is not None:
                        yield from _described(graph.get_operations())
