"""``kt.explain``: what a step of training does on towers, line by line."""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from operator import attrgetter
from typing import TypeAlias

import keras

from keras_towers.fit.calls.tower_runner import TowerRunner
from keras_towers.fit.context import patches
from keras_towers.fit.data.epoch_iterator import Undistributed
from keras_towers.fit.places import Places
from keras_towers.fit.step.graph.code_lines import cause_of
from keras_towers.fit.step.graph.trace import Trace
from keras_towers.fit.step.reports.step_costs import (
    Exchanged,
    describe_total,
    exchanged_by,
)
from keras_towers.fit.weights import model_binding, model_state
from keras_towers.foundation import compat
from keras_towers.foundation.errors import TowerError
from keras_towers.foundation.object_types import Structure
from keras_towers.foundation.tf_strategy import Strategy
from keras_towers.inspection.verification import (
    checked_strategy,
    restored_values,
)
from keras_towers.partition.ir.called_functions import functions_of
from keras_towers.partition.ir.layouts import (
    Layout,
    ListOf,
    Partial,
    Sharded,
    sizes_of,
)
from keras_towers.partition.ir.program import Exchange, Operation, Phase, Tensor
from keras_towers.partition.ir.sizes import EXAMPLES, symbol_name
from keras_towers.partition.ir.values import Value
from keras_towers.partition.timeline.timeline import Timeline
from keras_towers.strategies.base import BaseStrategy


@dataclasses.dataclass(frozen=True)
class Explanation:
    """A step of training on towers, as text.

    Attributes:
        description: the strategy's ``describe()``.
        program: the lines of the step: levels, and in each of them operations,
            exchanges and updates.
    """

    description: str
    program: Sequence[str]

    def __str__(self) -> str:
        return "\n".join([self.description, *self.program])


def explain(
    model: keras.Model,
    x: Structure = None,
    y: Structure = None,
    sample_weight: Structure = None,
    *,
    strategy: Strategy | None = None,
    batch_size: int | None = None,
) -> Explanation:
    """Explain what a step of ``fit`` does on towers, without running it.

    This traces and divides the step as ``fit`` does. Each line of the result
    describes operations, an exchange or an update of a level:

    * the place: ``once``, if one device computes it for all; all ``towers`` or
      their ``columns``; or the axes of an exchange;
    * the layout of the result: ``rows`` of the batch or a ``shard`` of a
      variable on each tower, a ``partial`` sum, or the ``whole``; its dtype,
      and its shape on one device. A ``local`` value exists only on towers, and
      has its shape on a tower. On columns, shapes are those of a column's part;
    * the operations, or the bytes of an exchange, and the line of code.

    Afterwards, variables and the random generators of Python and NumPy have
    their old values. If the model is not built, this builds it. If ``x`` is a
    generator, this uses up one of its batches.

    Args:
        model: a compiled model.
        x: data, as for ``fit``: arrays, dictionaries, datasets, generators.
        y: targets, as for ``fit``.
        sample_weight: weights of the examples, as for ``fit``.
        strategy: the towers; None: ``TowerStrategy()``.
        batch_size: examples in a batch of arrays, as for ``fit``.

    Raises:
        TowerError: the model is not compiled, runs eagerly, or is on towers;
            there is no data, or ``strategy`` is invalid or divides no step.

    Example:
        >>> print(keras_towers.explain(model, x, y))
        TowerStrategy: 2 towers (/device:CPU:0 to /device:CPU:1)
          ...
        1 level, for n examples in the global batch
        level 0
          towers           rows float32[n, 3]     MatMul, AddV2: dense, in ...
          sum over towers  partial float32[5, 3]  60 bytes, gradient of ...
          update                                  SGD: 2 weights
    """
    towers = checked_strategy("explain", model, x, strategy)
    if model_state.runs_eagerly(model):
        raise TowerError(
            f"explain got model {model.name!r}, which runs eagerly, so towers "
            "do not divide its steps: leave out "
            f"{model_state.eager_cause(model)}."
        )
    runner = _runner_of(towers)
    arrays = (x, y, sample_weight, batch_size)
    reader = compat.TFEpochIterator(Undistributed, *arrays)
    dataset = reader._distributed_dataset
    size = reader.data_adapter.batch_size or compat.batch_size_of(dataset)
    with (
        restored_values(model),
        model_binding.ignoring_default_strategy(model),
        # The description says it.
        patches.shadowed(towers, {"_announce": lambda: None}),
        towers,
    ):
        traced, timeline = runner.plan(model, dataset.element_spec, size)
        text = _StepText(traced, timeline, runner.places("fit"))
    return Explanation(towers.describe(), text.lines(size))


def _runner_of(strategy: BaseStrategy) -> TowerRunner:
    """Return the runner of a strategy that divides steps over towers."""
    runner = strategy._runner
    # Others run the steps of one device, each on a batch of its own.
    if type(runner) is not TowerRunner or runner.runs_plain_keras:
        raise TowerError(
            f"strategy={strategy!r} divides no step, so there is nothing to "
            "explain: give one whose towers share each batch, such as "
            "TowerStrategy(2)."
        )
    return runner


# The place, the layout, the operation and the line of code.
_Line: TypeAlias = "tuple[str, str, str, str]"
_Row: TypeAlias = "tuple[str, str, str]"

# By the kind of an exchange, and whether all get a result of their own.
_KINDS = {
    ("sum", True): "all-reduce",
    ("gather", True): "all-gather",
    ("scatter", True): "reduce-scatter",
    ("before", True): "sum of earlier ones",
    ("first", False): "the first one's",
    ("root", False): "rank 0's",
}
# Longer texts are wider than the column.
_WIDEST = 36


class _StepText:
    """The text of a step.

    Args:
        traced: the step on one device.
        timeline: when the step does what on towers.
        places: where it runs.
    """

    def __init__(self, traced: Trace, timeline: Timeline, places: Places):
        self._traced, self._timeline = traced, timeline
        ranks = places.ranks.step.size
        self._sizes: Mapping[str, int] = {
            "columns": places.columns,
            "towers": places.towers,
            "ranks": ranks,
        }
        self._parts = places.towers * places.micro_batches * ranks
        self._values: dict[Tensor, Value] = {}
        for value in timeline.program.values.values():
            for tensor in (value.local, value.whole):
                if tensor is not None:
                    self._values.setdefault(tensor, value)
        self._gradients = traced.gradients
        self._cause_of = functools.cache(cause_of)

    def lines(self, examples: int | None) -> list[str]:
        """Describe the step, line by line.

        Args:
            examples: how many a global batch has, if that is known.
        """
        by_level = [
            [*self._operations(operations), *self._exchanges(exchanges)]
            for operations, exchanges in self._timeline.by_level
        ]
        rows = [row for of_level in by_level for row in of_level]
        widths = [
            min(_WIDEST, max(map(len, column), default=0))
            for column in zip(*rows, strict=True)
        ]
        levels = "1 level" if len(by_level) == 1 else f"{len(by_level)} levels"
        any_number = symbol_name(EXAMPLES)
        of_any_size = re.compile(rf"\[.*\b\d*{any_number}\b.*\]")
        number: int | str | None = examples
        if any(of_any_size.search(layout) for _, layout, _ in rows):
            number = any_number
        of_batch = f"{number or 'all'} examples in the global batch"
        lines = [f"{levels}, for {of_batch}"]
        for level, of_level in enumerate(by_level):
            lines.append(f"level {level}")
            for *columns, text in of_level:
                padded = map(str.ljust, columns, widths)
                lines.append("  ".join(["", *padded, text]))
        return lines

    def _operations(self, operations: Iterable[Operation]) -> Iterator[_Row]:
        in_order = sorted(operations, key=attrgetter("phase"))
        alike: dict[_Row, collections.Counter[str]] = {}
        for operation in in_order:
            place, layout, type_, where = self._operation(operation)
            key = place, layout, where
            alike.setdefault(key, collections.Counter())[type_] += 1
        for (place, layout, where), types in alike.items():
            names = ", ".join(itertools.starmap(_times, types.items()))
            yield place, layout, _at(names, where)

    def _exchanges(self, exchanges: Iterable[Exchange]) -> Iterator[_Row]:
        alike: dict[_Line, list[Exchange]] = {}
        for exchange in exchanges:
            alike.setdefault(self._exchange(exchange), []).append(exchange)
        for (place, layout, type_, where), equal in alike.items():
            moved = [
                exchanged_by(exchange, self._parts, level=0)
                for exchange in equal
                if exchange.kind != "first"
            ]
            size, names = self._describe_bytes(moved), _times(type_, len(equal))
            yield place, layout, f"{size}, {_at(names, where)}"

    def _operation(self, operation: Operation) -> _Line:
        of_towers = "towers" in operation.axes
        place = "towers" if of_towers else "once"
        if "columns" in operation.axes:
            place = "columns" if of_towers else "once in each column"
        phases = {Phase.READ: " read", Phase.UPDATE: " update"}
        place += phases.get(operation.phase, "")
        layouts = dict.fromkeys(map(self._layout, operation.outputs))
        # Results of a loop that all towers have are of little interest.
        own = [text for text in layouts if not text.startswith("whole")]
        layout = "; ".join(own or [*layouts][:1])
        return place, layout, _type(operation), self._where(operation)

    def _exchange(self, exchange: Exchange) -> _Line:
        tensor = exchange.given
        axes = self._over(exchange.over)
        name = _KINDS.get((exchange.kind, exchange.is_own), exchange.kind)
        place = f"{name}{axes}"
        if exchange.gradient:
            _, weight = self._gradients[exchange.gradient]
            return place, self._layout(tensor), f"gradient of {weight.path}", ""
        operation = tensor.operation
        if operation is None:
            return place, self._layout(tensor), "an input", ""
        where = self._where(operation)
        return place, self._layout(tensor), _type(operation), where

    def _describe_bytes(self, moved: Iterable[Exchanged]) -> str:
        return describe_total(part for part in moved if self._peers(part.over))

    def _peers(self, axes: Iterable[str]) -> list[str]:
        """Return the axes along which there are several participants."""
        sizes = self._sizes.items()
        return [axis for axis, size in sizes if axis in axes and size > 1]

    def _over(self, axes: Iterable[str]) -> str:
        peers = self._peers(axes)
        return f" over {' and '.join(peers)}" if peers else " of one tower"

    def _where(self, operation: Operation) -> str:
        """Return the line of the code that an operation belongs to."""
        source = operation.source
        if source is None:
            source = self._traced_operations.get(operation.name)
        return "" if source is None else self._cause_of(source)

    @functools.cached_property
    def _traced_operations(self) -> Mapping[str, object]:
        operations = self._traced.graph.get_operations()
        return {operation.name: operation for operation in operations}

    def _layout(self, tensor: Tensor) -> str:
        """Describe the layout, the dtype and the shape of a tensor."""
        value = self._values.get(tensor)
        if value is None:
            layout = "local" if "towers" in tensor.axes else "whole"
            shape = None if tensor.shape.rank is None else tensor.shape
            sizes = None if shape is None else sizes_of(shape)
        else:
            sizes = value.shape
            is_whole = tensor is value.whole
            layout = "whole" if is_whole else _layout_name(value.layout)
        inside = "..." if sizes is None else ", ".join(map(str, sizes))
        return f"{layout} {tensor.dtype.name}[{inside}]"


def _type(operation: Operation) -> str:
    """Return the type of an operation, with the number of operations inside."""
    inside = _inside(operation)
    return f"{operation.type} of {inside}" if inside else operation.type


def _inside(operation: Operation) -> int:
    """Return the number of operations in the functions that one calls."""
    return sum(
        1 + _inside(inner)
        for function in functions_of(operation)
        for inner in function.operations
        if not inner.is_repeated
    )


def _layout_name(layout: Layout) -> str:
    match layout:
        case Sharded(axis=axis):
            name = "shard" if layout.of_variables else "rows"
            return name if axis <= 0 else f"{name} of axis {axis}"
        case Partial():
            return "partial"
        case ListOf():
            return f"list of {_layout_name(layout.element)}"
        case _:
            return "whole"


def _times(name: str, count: int) -> str:
    return name if count == 1 else f"{name} x {count}"


def _at(what: str, where: str) -> str:
    return f"{what}: {where}" if where else what
