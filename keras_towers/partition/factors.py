"""Which axes of an operation's inputs and outputs are the same.

An operation that does to each entry along an axis what it does to all can be
divided by that axis. The axes are labelled, as those of an einsum: one label,
one axis that may be divided. Shardy's rules name such factors, too.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Sequence
from typing import Any, TypeAlias

from keras_towers.partition.layouts import Value
from keras_towers.partition.program import Tensor

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
        outputs: those of its outputs; None: their rank is not known.
        summed: labels over which it sums: the sum of the results for some of
            the entries each is the result for all.
        linear: groups of inputs; the operation is linear in those of a group
            together, if the others are what they are.
        needs_rows: whether TensorFlow refuses it, or makes nothing sensible of
            it, if there are no rows.
        attributes: those that are others on towers.
        given: inputs that towers are given in place of those of one device.
    """

    inputs: Sequence[Labels | None]
    outputs: Sequence[Labels | None]
    summed: frozenset[Hashable] = frozenset()
    linear: Sequence[frozenset[int]] = ()
    needs_rows: bool = False
    attributes: dict[str, Any] = dataclasses.field(default_factory=dict)
    given: dict[int, Tensor] = dataclasses.field(default_factory=dict)

    def may_divide(self, label: Hashable | None) -> bool:
        """Whether the operation may be divided by an axis."""
        if label is None:
            return False
        kept = [label in (output or ()) for output in self.outputs]
        return all(kept) or (label in self.summed and not any(kept))

    def labels(self, inputs: Sequence[Value]) -> list[Labels]:
        """Return the labels of inputs; None for axes that are repeated.

        An axis of size 1 is repeated where others are longer.
        """
        sizes = self._sizes(inputs)
        found: list[Labels] = []
        for value, labels in zip(inputs, self.inputs, strict=True):
            if labels is None or value.shape is None:
                found.append(labels or [None] * len(value.shape or ()))
                continue
            found.append(
                [
                    None if size == 1 and sizes.get(label) != 1 else label
                    for size, label in zip(value.shape, labels, strict=True)
                ]
            )
        return found

    def shapes(self, inputs: Sequence[Value]) -> list[tuple[Any, ...] | None]:
        """Return the shapes of the outputs, as far as they are known."""
        sizes = self._sizes(inputs)
        return [
            None
            if labels is None
            else tuple(sizes.get(label) for label in labels)
            for labels in self.outputs
        ]

    def _sizes(self, inputs: Sequence[Value]) -> dict[Hashable, Any]:
        sizes: dict[Hashable, Any] = {ONE: 1}
        for value, labels in zip(inputs, self.inputs, strict=True):
            if labels is None or value.shape is None:
                continue
            for label, size in zip(labels, value.shape, strict=True):
                # What is not known may be longer than 1.
                if sizes.get(label, 1) == 1 or sizes[label] is None:
                    is_longer = size != 1 or label not in sizes
                    sizes[label] = size if is_longer else sizes[label]
        sizes.pop(None, None)
        return sizes
