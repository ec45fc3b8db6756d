"""The tensors of what computes in a step: of a tower, or of its columns."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any

from keras_towers.errors import TowerError
from keras_towers.partition.emission import emit
from keras_towers.partition.program import Tensor


class TowerTensors:
    """The tensors of a tower in a step, or of one of its columns.

    Args:
        device: where it computes.
        scopes: for each micro-batch, its inputs and then what it shares with
            others.

    Attributes:
        device: where it computes.
        shared: the tensors that its micro-batches share.
        parts: for each micro-batch its tensors, chained to the shared ones.
        sums: the sums over micro-batches of tensors that are summed over
            towers.
    """

    def __init__(
        self,
        device: str,
        scopes: Sequence[Sequence[MutableMapping[Tensor, Any]]],
    ):
        self.device = device
        self.shared: dict[Tensor, Any] = {}
        self.parts: list[ChainMap[Tensor, Any]] = [
            ChainMap(own, self.shared, *others) for own, *others in scopes
        ]
        self.sums: dict[Tensor, Any] = {}

    def add(self, tensor: Tensor, value: Any) -> Any:
        """Add a micro-batch's tensor to a sum; return the sum so far."""
        before = self.sums.get(tensor)
        self.sums[tensor] = value if before is None else before + value
        return self.sums[tensor]

    def sum(self, tensor: Tensor) -> Any:
        """Return the sum over all micro-batches."""
        if tensor not in self.sums:
            for part in self.parts:
                self.add(tensor, value_of(tensor, part))
        return self.sums[tensor]


def with_shapes(
    tensors: Sequence[Tensor], values: Sequence[Any]
) -> dict[Tensor, Any]:
    """Return values by their tensors, with the shapes of these.

    TensorFlow does not infer all shapes that the layout knows.

    Raises:
        TowerError: TensorFlow infers another shape.
    """
    for tensor, value in zip(tensors, values, strict=True):
        if not value.shape.is_compatible_with(tensor.shape):
            source = tensor.operation
            name = value.op.name if source is None else source.name
            raise TowerError(
                f"the step cannot be divided: {name!r} has the shape "
                f"{value.shape} where the layout has {tensor.shape}. This is a "
                "defect of keras_towers: please report it, with the model. "
                "Without a strategy, the model trains on one device."
            )
        value.set_shape(tensor.shape)
    return dict(zip(tensors, values, strict=True))


def value_of(tensor: Tensor, scope: Mapping[Tensor, Any]) -> Any:
    """Return the TensorFlow tensor of a program's tensor."""
    return scope[tensor] if tensor in scope else emit([], scope, [tensor])[0]
