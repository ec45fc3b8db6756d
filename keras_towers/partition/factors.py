"""The axes that the inputs and outputs of an operation share.

An operation can be divided along an axis if it treats all entries along it
independently. The axes are labeled as in an einsum: a label stands for one
axis that may be divided. Shardy calls them factors, too.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Hashable, Mapping, Sequence
from typing import Any, TypeAlias

from keras_towers.partition.layouts import Values
from keras_towers.partition.sizes import UNKNOWN, broadcast_size

# None: the axis cannot be divided.
Labels: TypeAlias = "Sequence[Hashable | None]"


@dataclasses.dataclass(frozen=True)
class NewAxis:
    """The label of an output axis of this size, which cannot be divided."""

    size: Any


@dataclasses.dataclass(frozen=True)
class Factors:
    """The axes of an operation.

    Attributes:
        inputs: the labels of the axes of each input; None: the input is
            replicated.
        outputs: the labels of the axes of each output.
        linear: groups of inputs. The operation is linear in the inputs of a
            group taken together, for fixed values of the remaining inputs.
        summed: labels of axes that the operation sums over. Applied to
            slices of the axis, its outputs add up to the full output.
        needs_rows: whether TensorFlow fails or returns garbage for 0 rows.
        attributes: the attributes that differ on towers.
        entries: new entries of vectors among the inputs, by the index of the
            input; None: the entry is unchanged.
    """

    inputs: Sequence[Labels | None]
    outputs: Sequence[Labels]
    linear: Sequence[Collection[int]] = ()
    summed: Collection[Hashable] = ()
    needs_rows: bool = False
    attributes: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    entries: Mapping[int, Sequence[int | None]] = dataclasses.field(
        default_factory=dict
    )

    def may_divide(self, label: Hashable | None) -> bool:
        """Whether the operation may be divided along an axis."""
        if label is None:
            return False
        kept = [label in output for output in self.outputs]
        return all(kept) or (label in self.summed and not any(kept))

    def labels(self, inputs: Values) -> list[Labels]:
        """Return the labels of inputs, None for axes that are broadcast.

        An axis of size 1 is broadcast if an axis with the same label is longer.
        """
        sizes = self._sizes(inputs)
        labels_of_inputs: list[Labels] = []
        for value, labels in zip(inputs, self.inputs, strict=True):
            shape = value.shape or ()
            labels_of_inputs.append(
                [
                    None if size == 1 and sizes.get(label) != 1 else label
                    for size, label in zip(
                        shape, labels or [None] * len(shape), strict=True
                    )
                ]
            )
        return labels_of_inputs

    def shapes(self, inputs: Values) -> list[tuple[Any, ...]]:
        """Return the shapes of the outputs, as far as they are known."""
        sizes = self._sizes(inputs)
        return [
            tuple(
                label.size
                if isinstance(label, NewAxis)
                else sizes.get(label, UNKNOWN)
                for label in labels
            )
            for labels in self.outputs
        ]

    def _sizes(self, inputs: Values) -> dict[Hashable, Any]:
        sizes: dict[Hashable, Any] = {}
        for value, labels in zip(inputs, self.inputs, strict=True):
            for label, size in zip(
                labels or (), value.shape or (), strict=False
            ):
                if label is not None:
                    sizes[label] = broadcast_size(sizes.get(label, 1), size)
        return sizes


def elementwise(
    inputs: Values, linear: Sequence[Collection[int]] = ()
) -> Factors:
    """Return the axes of an elementwise operation with broadcasting."""
    rank = max(value.rank for value in inputs)
    labels = [range(rank - value.rank, rank) for value in inputs]
    return Factors(labels, [range(rank)], linear)


def along_axes(
    reduced: Collection[int],
    inputs: Values,
    outputs: int = 1,
    linear: Sequence[Collection[int]] = (),
    keeps: bool = True,
) -> Factors:
    """Return the axes of an operation that works along axes of its first input.

    Args:
        reduced: the axes that it works along.
        inputs: its inputs; all but the first are replicated.
        outputs: the number of outputs.
        linear: as in ``Factors``.
        keeps: whether the outputs have these axes, too.
    """
    labels: list[Any] = list(range(inputs[0].rank))
    left = [a for a in labels if a not in reduced]
    if keeps:
        left = [
            NewAxis(size) if axis in reduced else axis
            for axis, size in enumerate(inputs[0].sizes)
        ]
    labels = [None if a in reduced else a for a in labels]
    options = [None] * (len(inputs) - 1)
    return Factors([labels, *options], [left] * outputs, linear)
