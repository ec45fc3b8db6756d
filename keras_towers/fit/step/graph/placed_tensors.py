"""The tensors of a step, with one value at each place where they differ.

``tower_program.py`` fills them, micro-batch after micro-batch.
"""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import tensorflow as tf

from keras_towers.fit.places import Places
from keras_towers.foundation.errors import TowerError
from keras_towers.partition.emission import value_of
from keras_towers.partition.ir.axes import Axes, Axis
from keras_towers.partition.ir.program import Tensor

Place: TypeAlias = tuple[int, ...]
"""A tower, a column and a micro-batch."""
PLACE_AXES: Sequence[Axis] = "towers", "columns", "micro_batches"


class TensorsAt(MutableMapping[Tensor, Any]):
    """The tensors at one place: inputs and results of what is computed there.

    Args:
        arrays: the tensors at all places.
        lengths: for each axis the number of places, or 1 if these share what
            is computed.
        place: the place; 0 along the axes of length 1.
        device: where it is computed.

    Attributes:
        device: where it is computed.
    """

    def __init__(
        self,
        arrays: dict[Tensor, np.ndarray],
        lengths: Sequence[int],
        place: Place,
        device: str,
    ):
        self._arrays, self.lengths, self.place = arrays, lengths, place
        self.tower, self.column, self.micro_batch = place
        self.device = device

    def __getitem__(self, tensor: Tensor) -> Any:
        array = self._arrays[tensor]
        towers, columns, micro_batches = array.shape
        all_towers, all_columns, _ = self.lengths
        value = None
        # A tensor that is computed once cannot use one that differs.
        if towers <= all_towers and columns <= all_columns:
            value = array[
                self.tower if towers > 1 else 0,
                self.column if columns > 1 else 0,
                self.micro_batch if micro_batches > 1 else 0,
            ]
        if value is None:
            raise KeyError(tensor)
        return value

    def __setitem__(self, tensor: Tensor, value: Any) -> None:
        if tensor not in self._arrays:
            self._arrays[tensor] = np.empty(self.lengths, object)
        self._arrays[tensor][self.place] = value

    def __delitem__(self, tensor: Tensor) -> None:
        del self._arrays[tensor]

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self._arrays)

    def __len__(self) -> int:
        return len(self._arrays)


class PlacedTensors:
    """The tensors of a step, each with a value at every place where it differs.

    A tensor is an array of objects with the axes tower, column and micro-batch,
    of length 1 along an axis where all share it.

    Args:
        places: where the step computes.

    Attributes:
        places: where the step computes.
        shared: the tensors that all share.
    """

    def __init__(self, places: Places):
        self.places = places
        self._arrays: dict[Tensor, np.ndarray] = {}
        # Over the micro-batches of each tower.
        self._sums: dict[Tensor, np.ndarray] = {}
        self.shared: TensorsAt = self.at((1, 1, 1), (0, 0, 0))

    def lengths(self, axes: Axes) -> Sequence[int]:
        """Return the lengths of an array for a value that varies along axes."""
        places = self.places
        of_all = places.towers, places.columns, places.micro_batches
        return [
            length if axis in axes else 1
            for axis, length in zip(PLACE_AXES, of_all, strict=True)
        ]

    def at(self, lengths: Sequence[int], place: Place) -> TensorsAt:
        """Return the tensors at a place."""
        tower, column, _ = place
        device = self.places.mesh[tower][column]
        return TensorsAt(self._arrays, lengths, place, device)

    def at_places(self, axes: Axes) -> list[TensorsAt]:
        """Return the tensors at each of the places that differ along axes."""
        lengths = self.lengths(axes)
        return [self.at(lengths, place) for place in np.ndindex(*lengths)]

    def array(self, tensor: Tensor) -> np.ndarray:
        """Return the values of a tensor."""
        if tensor in self._arrays:
            return self._arrays[tensor]
        # It is repeated wherever it is used.
        places = self.at_places(tensor.axes)
        array = np.empty(places[0].lengths, object)
        for here in places:
            array[here.place] = value_of(tensor, here)
        return array

    def add(self, tensor: Tensor, here: TensorsAt) -> Any:
        """Add a micro-batch's value to its tower's sum; return the sum."""
        place = here.tower, here.column, 0
        value = here[tensor]
        if tensor not in self._sums:
            towers, columns, _ = self._arrays[tensor].shape
            self._sums[tensor] = np.empty((towers, columns, 1), object)
        elif here.micro_batch > 0:
            value = self._sums[tensor][place] + value
        self._sums[tensor][place] = value
        return value

    def sum(self, tensor: Tensor) -> np.ndarray:
        """Return the sums of a tensor over the micro-batches of each tower."""
        if tensor in self._sums:
            return self._sums[tensor]
        return np.add.reduce(self.array(tensor), axis=2, keepdims=True)


def with_shapes(
    tensors: Sequence[Tensor], values: Sequence[tf.Tensor]
) -> dict[Tensor, tf.Tensor]:
    """Return values by tensor, with the shapes of the tensors.

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
