"""Which axes of an operation's inputs and outputs are the same.

An operation that does to each entry along an axis what it does to all can be
divided by that axis. The axes are labelled, as those of an einsum: one label,
one axis that may be divided. Shardy's rules name such factors, too.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Hashable, Mapping, Sequence
from typing import Any, TypeAlias

from keras_towers.partition.layouts import Values
from keras_towers.partition.sizes import UNKNOWN, longer

# The label of an output's axis of size 1.
ONE = "1"
# None: an axis that cannot be divided.
Labels: TypeAlias = "Sequence[Hashable | None]"


@dataclasses.dataclass(frozen=True)
class Factors:
    """The axes of an operation.

    Attributes:
        inputs: the labels of the axes of N inputs; None: an input that all
            towers have.
        outputs: those of its outputs.
        linear: groups of inputs; the operation is linear in those of a group
            together, if the others are what they are.
        summed: labels over which it sums: the sum of the results for some of
            the entries each is the result for all.
        needs_rows: whether TensorFlow refuses it, or makes nothing sensible of
            it, if there are no rows.
        attributes: those that are others on towers.
        entries: of vectors that towers are given in place of those of one
            device; None: an entry that is the same.
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
        """Whether the operation may be divided by an axis."""
        if label is None:
            return False
        kept = [label in output for output in self.outputs]
        return all(kept) or (label in self.summed and not any(kept))

    def labels(self, inputs: Values) -> list[Labels]:
        """Return the labels of inputs; None for axes that are repeated.

        An axis of size 1 is repeated where others are longer.
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
            tuple(sizes.get(label, UNKNOWN) for label in labels)
            for labels in self.outputs
        ]

    def _sizes(self, inputs: Values) -> dict[Hashable, Any]:
        sizes: dict[Hashable, Any] = {ONE: 1}
        for value, labels in zip(inputs, self.inputs, strict=True):
            for label, size in zip(
                labels or (), value.shape or (), strict=False
            ):
                if label is not None:
                    sizes[label] = longer(sizes.get(label, 1), size)
        return sizes


def elementwise(
    inputs: Values, linear: Sequence[Collection[int]] = ()
) -> Factors:
    """Return the axes of an operation whose inputs are broadcast."""
    rank = max(value.rank for value in inputs)
    labels = [range(rank - value.rank, rank) for value in inputs]
    return Factors(labels, [range(rank)], linear)


def along(
    gone: Collection[int],
    inputs: Values,
    outputs: int = 1,
    linear: Sequence[Collection[int]] = (),
    keeps: bool = True,
) -> Factors:
    """Return the axes of an operation that works along some of the first's.

    Args:
        gone: the axes that it works along.
        inputs: its inputs; all but the first are options.
        outputs: the number of its outputs.
        linear: as of ``Factors``.
        keeps: whether the axes are there in the outputs, too.
    """
    labels = [None if a in gone else a for a in range(inputs[0].rank)]
    left = labels if keeps else [a for a in labels if a is not None]
    options = [None] * (len(inputs) - 1)
    return Factors([labels, *options], [left] * outputs, linear)
