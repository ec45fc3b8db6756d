"""The registry of operations: one row of facts for each type.

The rows are in the files of ``rules``. The axes that inputs and outputs share
are labeled as in an einsum: a label stands for one axis, which may be divided.
Shardy calls such labels factors, too.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from typing import Any, Literal, TypeAlias

from keras_towers.foundation import compat
from keras_towers.foundation.errors import TowerError
from keras_towers.partition.ir.layouts import Shape
from keras_towers.partition.ir.program import Attributes
from keras_towers.partition.ir.sizes import UNKNOWN, Dimension, broadcast_size
from keras_towers.partition.ir.values import Value, Values

# Functions of a node and the values of its inputs. They return the values of
# its outputs, or the labels of its axes.
Rule: TypeAlias = "Callable[..., Values]"
FactorsOf: TypeAlias = "Callable[..., Factors]"
# None: the axis cannot be divided.
Labels: TypeAlias = "Sequence[Hashable | None]"


@dataclasses.dataclass(frozen=True)
class NewAxis:
    """The label of a new axis of this size, which cannot be divided."""

    size: Dimension


@dataclasses.dataclass(frozen=True)
class Factors:
    """The axes of an operation, labeled as in an einsum.

    Attributes:
        inputs: the labels of the axes of each input; None: the input is
            replicated, as are those after the last one that is labeled here.
        outputs: the labels of the axes of each output; None: the output is
            replicated, and has the traced shape.
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
    outputs: Sequence[Labels | None]
    linear: Sequence[Collection[int]] = ()
    summed: Collection[Hashable] = ()
    needs_rows: bool = False
    attributes: Attributes = dataclasses.field(default_factory=dict)
    entries: Mapping[int, Sequence[int | None]] = dataclasses.field(
        default_factory=dict
    )

    def may_divide(self, label: Hashable | None) -> bool:
        """Whether the operation may be divided along an axis."""
        if label is None:
            return False
        outputs = [labels for labels in self.outputs if labels is not None]
        kept = [label in labels for labels in outputs]
        return all(kept) or (label in self.summed and not any(kept))

    def labels(self, inputs: Values) -> list[Labels]:
        """Return the labels of inputs, None for axes that are broadcast.

        An axis of size 1 is broadcast if an axis with the same label is longer.
        """
        sizes = self._sizes(inputs)
        labels_of_inputs: list[Labels] = []
        for value, labels in self._labeled(inputs):
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

    def shapes(self, inputs: Values) -> list[Shape | None]:
        """Return the shapes of the outputs, as far as they are known."""
        sizes = self._sizes(inputs)
        return [
            None
            if labels is None
            else tuple(
                label.size
                if isinstance(label, NewAxis)
                else sizes.get(label, UNKNOWN)
                for label in labels
            )
            for labels in self.outputs
        ]

    def _labeled(self, inputs: Values) -> list[tuple[Value, Labels | None]]:
        more = [None] * (len(inputs) - len(self.inputs))
        return list(zip(inputs, [*self.inputs, *more], strict=True))

    def _sizes(self, inputs: Values) -> dict[Hashable, Dimension]:
        sizes: dict[Hashable, Dimension] = {}
        for value, labels in self._labeled(inputs):
            for label, size in zip(
                labels or (), value.shape or (), strict=False
            ):
                if label is not None:
                    sizes[label] = broadcast_size(sizes.get(label, 1), size)
        return sizes


def elementwise(*linear: Collection[int]) -> FactorsOf:
    """Return a function that labels the axes of elementwise operations.

    Args:
        *linear: as in ``Factors``.
    """

    def label(node: object, *inputs: Value) -> Factors:
        rank = max(value.rank for value in inputs)
        labels = [range(rank - value.rank, rank) for value in inputs]
        return Factors(labels, [range(rank)], linear=linear)

    return label


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
    labels: list[Hashable] = list(range(inputs[0].rank))
    left = [a for a in labels if a not in reduced]
    if keeps:
        left = [
            NewAxis(size) if axis in reduced else axis
            for axis, size in enumerate(inputs[0].sizes)
        ]
    labels = [None if a in reduced else a for a in labels]
    return Factors([labels], [left] * outputs, linear=linear)


# ---- rows --------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class OperationFacts:
    """All that is known of a type of operations: axes, rules, effects, ...

    Functions take a node, and the values of its inputs.

    Attributes:
        rules: return the values of its outputs. They are tried in this order,
            then ``labels``: if one raises ``NotDivided``, the next one is. If
            all do, the operation is computed once.
        labels: returns the axes that inputs and outputs share. The ranks of its
            inputs are known.
        rows: computes the rows of a tower, and no others, if all inputs are
            replicated. It also takes the layout of the rows, after the node.
        shape: returns the global shape of all outputs.
        notes: note facts about the entries of the outputs, whose values they
            take, too.
        fold: returns the entries of the outputs, given those of the inputs, as
            far as they are known before the step runs.
        bounds: whether results are ``finite`` or NaN, or infinite only if
            ``inputs`` are; None: they may be infinite.
        factor: what it does with an input in which it is not linear:
            ``divides`` by it, or only ``selects`` by it, so that it may be
            infinite; None: it may multiply by it.
        memory: the memory of a result: that of its ``input``, which a variable
            may be, or that of an input which ends there is ``reused``; None:
            its own.
        work: what it computes: a ``product``, as of matrices, several
            ``products``, or a ``convolution``; ``picked``: it moves only as
            many entries of its inputs as it makes; None: it moves all.
        entry_work: the multiplications that each entry that it makes takes,
            beside these.
        effect: what it does at most, if TensorFlow says that it has a state:
            it ``reads`` a variable, ``checks`` something, and fails, or
            ``writes`` what each process has; None: it may do anything.
            ``once``: TensorFlow does not say so, but it draws or reads files.
    """

    rules: Sequence[Rule] = ()
    labels: FactorsOf | None = None
    rows: Rule | None = None
    shape: Callable[..., Shape] | None = None
    notes: Sequence[Callable[..., None]] = ()
    fold: Callable[..., Any] | None = None
    bounds: Literal["finite", "inputs"] | None = None
    factor: Literal["divides", "selects"] | None = None
    memory: Literal["input", "reused"] | None = None
    work: Literal["product", "products", "convolution", "picked"] | None = None
    entry_work: int = 0
    effect: Literal["reads", "checks", "writes", "once"] | None = None


OPERATIONS: dict[str, OperationFacts] = {}
_NOTHING = OperationFacts()


def operation(types: str, *rules: Rule, **facts: Any) -> None:
    """Register the facts about operations of some types.

    Args:
        types: its type, or several of which the same is known.
        *rules: its rules.
        **facts: the other attributes of ``OperationFacts``.
    """
    row = OperationFacts(rules, **facts)
    OPERATIONS.update(dict.fromkeys(types.split(), row))


def add_operation(type_: str, labels: FactorsOf, **facts: Any) -> None:
    """Register how towers divide an operation of your own.

    Args:
        type_: its type, such as ``"MatMul"``.
        labels: returns the axes that its inputs and outputs share, such as
            ``elementwise()``, or a function that returns ``Factors``.
        **facts: what else is known: the attributes of ``OperationFacts``.

    Raises:
        TowerError: TensorFlow has no such operation.
    """
    if compat.op_definition(type_) is None:
        raise TowerError(
            f"add_operation got {type_!r}, but TensorFlow has no operation of "
            "this type: load the library that defines it first, for example "
            "with tf.load_op_library."
        )
    operation(type_, labels=labels, **facts)


def facts_of(type_: str) -> OperationFacts:
    """Return the facts about operations of a type."""
    return OPERATIONS.get(type_, _NOTHING)
