"""Operations of a graph, as the rules see them."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any


class Node:
    """One operation of a traced graph.

    Args:
        operation: the operation.
        ranks: of its N inputs, where more is known of them than the trace says.
    """

    def __init__(
        self, operation: Any, ranks: Sequence[int | None] | None = None
    ):
        self.operation = operation
        self._ranks = ranks
        self.type: str = operation.type
        self._inputs = list(operation.inputs)
        self._outputs = operation.outputs

    @property
    def num_inputs(self) -> int:
        """Number of inputs."""
        return len(self._inputs)

    @property
    def num_outputs(self) -> int:
        """Number of outputs."""
        return len(self._outputs)

    def attr(self, name: str) -> Any:
        """Return an attribute."""
        return self.operation.get_attr(name)

    def dtype(self, index: int) -> Any:
        """Return the dtype of an input."""
        return self._inputs[index].dtype

    def output_dtype(self, index: int) -> Any:
        """Return the dtype of an output."""
        return self._outputs[index].dtype

    def rank(self, index: int) -> int | None:
        """Return the rank of an input, or None."""
        rank = self._inputs[index].shape.rank
        if rank is None and self._ranks is not None:
            return self._ranks[index]
        return rank

    def output_rank(self, index: int = 0) -> int | None:
        """Return the rank of an output, or None."""
        return self._outputs[index].shape.rank

    def static_shape(self, index: int = 0) -> tuple[int | None, ...] | None:
        """Return what the trace knows of the shape of an output."""
        shape = self._outputs[index].shape
        return None if shape.rank is None else tuple(shape.as_list())

    @property
    def shapes(self) -> list[Any]:
        """The shapes of its outputs, as far as the trace knows them."""
        return [tensor.shape for tensor in self._outputs]

    @functools.cached_property
    def is_stateful(self) -> bool:
        """Whether it may have an effect, or draw random numbers."""
        return self.operation.op_def.is_stateful
