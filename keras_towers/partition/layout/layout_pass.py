"""Lays out the trace of the one-device step over towers, in one pass.

Forward and backward operations are treated the same. The rule of an operation
derives the layouts of its outputs from those of its inputs. If there is no
rule, or none applies, inputs are gathered or summed, and the operation is
computed once, as on one device. So a missing rule costs time, but never changes
a result.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import tensorflow as tf

from keras_towers.partition.ir.axes import ONCE, TOWERS, Axes
from keras_towers.partition.ir.effects import LOOPS, called_graphs
from keras_towers.partition.ir.layouts import (
    REPLICATED,
    InputLayout,
    InShards,
    ListOf,
    Mirrored,
    Shape,
    Sharded,
    sizes_of,
)
from keras_towers.partition.ir.program import Tensor
from keras_towers.partition.ir.reasons import (
    MISTAKE,
    NO_RULE,
    SHAPE,
    NotDivided,
    asserted,
    require,
    unless_none,
)
from keras_towers.partition.ir.sizes import UNKNOWN, Size
from keras_towers.partition.ir.values import Value, Values, replicated
from keras_towers.partition.layout.column_exchanges import exchange_over_columns
from keras_towers.partition.layout.division import divide, rows_along
from keras_towers.partition.layout.folding import constant, folded
from keras_towers.partition.layout.list_conversions import CannotGather
from keras_towers.partition.layout.nodes import Node, Scope
from keras_towers.partition.layout.undivided import (
    compute_once,
    uses_handles,
    wholes_of,
)

_BRANCHES = ("If", "StatelessIf", "Case", "StatelessCase")


def lay_out_graph(scope: Scope, graph: Any, inputs: Values) -> dict[str, Value]:
    """Lay out a graph; return the values of its tensors by their names.

    Args:
        scope: what is around it.
        graph: the graph of the step, or of a function.
        inputs: the values of its N inputs.
    """
    # The body of a loop is laid out several times.
    if graph not in scope.graphs:
        scope.graphs.append(graph)
    values: dict[str, Value] = {}
    for tensor, value in zip(graph.inputs, inputs, strict=True):
        if value.shape is None and tensor.shape.rank is not None:
            value.shape = sizes_of(tensor.shape)
        values[tensor.name] = value
    lay_out = scope.lay_out_node or lay_out_node
    before, scope.values = scope.values, values
    try:
        for operation in sort_topologically(graph.get_operations(), values):
            outputs = operation.outputs
            if outputs and outputs[0].name in values:
                continue
            scope.builder.name = operation.name
            operands = [values[tensor.name] for tensor in operation.inputs]
            results = lay_out(Node(operation, scope), operands)
            names = [tensor.name for tensor in outputs]
            values.update(zip(names, results, strict=True))
    finally:
        scope.values = before
    return values


def lay_out_function(scope: Scope, graph: Any, inputs: Values) -> Values:
    """Lay out a graph; return the values of its outputs."""
    values = lay_out_graph(scope, graph, inputs)
    return [values[tensor.name] for tensor in graph.outputs]


class Mistake(Exception):
    """Raised if a rule fails with an error, a mistake in the rule.

    Args:
        operation: the traced operation.
    """

    def __init__(self, operation: tf.Operation):
        super().__init__(operation.type)
        self.operation = operation

    def after(self, undivided: frozenset[str]) -> frozenset[str]:
        """Warn of it; return the operations to compute once from now on.

        Args:
            undivided: the types that were computed once in this one.
        """
        cause = asserted(self.__cause__)
        name, type_ = self.operation.name, self.operation.type
        if type_ in undivided:
            raise cause
        warnings.warn(
            f"keras_towers failed to divide {name} over towers, so each "
            f"{type_} is computed once: {type(cause).__name__}: {cause}. "
            "Please report this.",
            RuntimeWarning,
            stacklevel=1,
        )
        return undivided | {type_}


def lay_out_node(node: Node, inputs: list[Value]) -> Values:
    """Lay out an operation; return the values of its outputs.

    Raises:
        NotDivided: in a function, it cannot be divided.
        Mistake: anything else went wrong.
    """
    try:
        return _lay_out_node(node, inputs)
    except (CannotGather, Mistake):
        raise
    except Exception as error:
        if isinstance(error, NotDivided) and not node.builder.can_exchange:
            raise
        raise Mistake(node.operation) from error


def _lay_out_node(node: Node, inputs: list[Value]) -> Values:
    marks, name = node.scope.marks, node.operation.name
    if node.type == "Const":
        (whole,) = node.copy((), is_repeated=True)
        shape, known = sizes_of(node.shapes[0]), constant(node.operation)
        return [Value(REPLICATED, whole=whole, shape=shape, known=known)]
    node.builder.gradient = marks.gradients.get(name, "")
    node.builder.device = marks.updates.get(name, "")
    # XLA takes values of variables, and returns new ones.
    of_update = name in marks.updates
    node.builder.of_update = of_update and not node.options.xla
    follows = node.scope.updates_follow if of_update else ()
    node.variables.reads_follow = follows
    if name in marks.layouts:
        return _gradients(node, inputs, marks.layouts[name])
    folds = folded(node, [value.known for value in inputs])
    is_whole = False
    try:
        require(node.type not in node.options.undivided, MISTAKE)
        outputs = _divided(node, inputs)
    except NotDivided as refused:
        node.reason = str(refused).format(node.type)
        outputs = _known_values(node, folds or ())
        is_whole = not outputs
        outputs = outputs or _undivided(node, inputs)
    if all(v.is_replicated for v in (*inputs, *outputs)):
        _note_rows(node, inputs, outputs)
    for output in outputs:
        if output.is_partial:
            output.local = node.converter.as_term(output.own)
    for note in node.facts.notes:
        with contextlib.suppress(NotDivided):
            note(node, inputs, outputs)
    _complete(node, inputs, outputs, folds)
    if is_whole and node.builder.can_exchange:
        _hand_back(node, inputs, outputs)
    return outputs


def _note_rows(node: Node, inputs: Values, outputs: Values) -> None:
    """Note how towers compute rows of replicated outputs, if it is needed.

    A size may equal the static number of examples by coincidence, such as the
    number of a layer's units. So a value that is made from sizes, such as
    zeros, has rows only where it meets rows. The same holds for what is
    computed from it.
    """
    follows = any(value.rows_from is not None for value in inputs)
    if node.facts.rows is None and not (follows and node.facts.labels):
        return
    for index, output in enumerate(outputs):
        rows_from = functools.partial(_rows_of_output, node, inputs, index)
        output.rows_from = rows_from


def _rows_of_output(
    node: Node, inputs: Values, index: int, layout: Sharded
) -> Tensor:
    """Return each tower's rows of an output whose inputs are replicated.

    Raises:
        NotDivided: they can only be sliced from the whole.
    """
    facts = node.facts
    if facts.rows is not None:
        with contextlib.suppress(NotDivided):
            return facts.rows(node, layout, *inputs)[index].own
    require(facts.labels and all(value.shape is not None for value in inputs))
    factors = asserted(facts.labels)(node, *inputs)
    return rows_along(node, inputs, factors, index, layout)


def _hand_back(node: Node, inputs: Values, outputs: Values) -> None:
    """Slice each tower's rows from a result that was computed once from rows.

    Later operations are divided again. Unused slices are pruned.
    """
    rows = [value.sharded for value in inputs if value.sharded is not None]
    if all(layout.of_variables for layout in rows):
        return
    for value in outputs:
        with contextlib.suppress(NotDivided):
            require(value.layout == REPLICATED and value.known is None)
            require(value.whole is not None and value.whole.handle is None)
            layout = _rows_among(node, value.sizes, rows)
            value.local = node.converter.shard(value, layout)
            value.layout = layout


def _rows_among(node: Node, sizes: Shape, rows: Sequence[Sharded]) -> Sharded:
    """Return the layout of the first axis that has rows.

    The layout of an input is preferred.

    Raises:
        NotDivided: there is none, or it may be one of several.
    """
    for layout in rows:
        # A number may be a coincidence.
        is_certain = isinstance(layout.size, Size) or node.options.may_coincide
        size = sizes[layout.axis : layout.axis + 1]
        if is_certain and size == (layout.size,):
            return layout
    require(any(isinstance(size, Size) for size in sizes))
    return node.units.find_row_axis(sizes)


def _divided(node: Node, inputs: Values) -> Values:
    """Divide an operation, after variables are gathered if that is needed.

    Raises:
        NotDivided: it has to be computed once.
    """
    if node.type in LOOPS:
        return _apply_to_wholes(node, inputs)
    try:
        return apply_rules(node, inputs)
    except NotDivided:
        calls = node.type in _BRANCHES or node.must_be_compiled
        if not calls and not _has_rows_and_shards(inputs):
            raise
    return _apply_to_wholes(node, inputs)


def _apply_to_wholes(node: Node, inputs: Values) -> Values:
    """Divide an operation after variables in shards are gathered.

    It is called if no rule can use the shards, or if its function cannot gather
    them. Gathering what is computed from examples would move more bytes.

    Raises:
        NotDivided: it has to be computed once.
    """
    wholes = list(map(node.converter.gathered, inputs))
    before = node.variables.gathers
    node.variables.gathers = True
    try:
        return apply_rules(node, wholes)
    finally:
        node.variables.gathers = before


def apply_rules(node: Node, inputs: Values) -> Values:
    """Divide an operation by its rules or the labels of its axes.

    Raises:
        NotDivided: it has to be computed once.
    """
    if any(v.shape is None for v in inputs if v.sharded is not None):
        raise NotDivided(SHAPE)
    facts, reason = node.facts, NO_RULE
    if node.operation.name in node.scope.marks.exchanges:
        return exchange_over_columns(node, *inputs)
    for rule in facts.rules:
        try:
            return rule(node, *inputs)
        except NotDivided as refused:
            reason = str(refused)
    if facts.labels is None or all(v.is_replicated for v in inputs):
        raise NotDivided(reason)
    require(all(value.shape is not None for value in inputs), SHAPE)
    return divide(node, inputs, facts.labels(node, *inputs))


def _undivided(node: Node, inputs: Values) -> Values:
    """Compute an operation once, as one device does.

    A function that XLA compiles gets the values of variables, not their
    handles. So all towers call it, with the values of one device.

    Raises:
        NotDivided: it is in a function, which it would have to leave.
    """
    calls = uses_handles(node) and called_graphs(node.operation)
    if calls and node.options.xla and node.builder.can_exchange:
        before = node.scope.computed_once.copy()
        try:
            return _apply_to_wholes(node, wholes_of(node, inputs))
        except NotDivided:
            node.scope.restore_computed_once(before)
    try:
        return compute_once(node, inputs)
    except NotDivided:
        # The caller is not divided for the same reason.
        raise NotDivided(node.reason) from None


def _known_values(node: Node, known: Sequence[Any]) -> Values:
    """Return outputs with known entries as constants, or none.

    XLA needs constants for shapes and axes.
    """
    dtypes = [tensor.dtype for tensor in node.operation.outputs]
    with contextlib.suppress(NotDivided):
        require(all(dtype.is_integer or dtype.is_bool for dtype in dtypes))
        wholes = map(node.units.known_tensor, known, dtypes)
        return [
            Value(REPLICATED, whole=unless_none(whole), known=entries)
            for entries, whole in zip(known, wholes, strict=True)
        ]
    return []


def _gradients(
    node: Node, inputs: list[Value], layouts: Sequence[InputLayout]
) -> Values:
    """Lay out gradients as an optimizer gets them.

    Gradients that it gets whole are summed in one round.
    """
    outputs: list[Value] = []
    name = node.operation.name
    for index, (value, layout) in enumerate(zip(inputs, layouts, strict=True)):
        node.builder.gradient = f"{name}:{index}"
        if isinstance(layout, InShards):
            rows = node.units.rows_in(layout)
            tensor = node.converter.shard(value, rows)
            outputs.append(Value(rows, tensor, shape=value.shape))
            continue
        to = TOWERS if isinstance(layout, Mirrored) else ONCE
        tensor = _whole_gradient(node, value, to)
        facts = Value(REPLICATED, shape=value.shape)
        outputs.append(replicated(tensor, facts))
    # Where weights are written, nothing else should have their memory.
    node.variables.read_again()
    # Rows are updated as their gradients arrive, one weight at a time. What
    # updates need, such as the learning rate, may not wait for the last one.
    in_shards = any(isinstance(layout, InShards) for layout in layouts)
    together = [e for e in node.builder.exchanges if e.round == name]
    node.scope.updates_follow = () if in_shards else together[-1:]
    if node.options.over_columns:
        ends = [asserted(v.local or v.whole) for v in outputs]
        copies = node.copy(ends, [end.shape for end in ends])
        for value, copy in zip(outputs, copies, strict=True):
            if value.local is None:
                value.whole = copy
            else:
                value.local = copy
    return outputs


def _whole_gradient(node: Node, value: Value, to: Axes) -> Tensor:
    """Return a whole gradient, computed once or on each tower.

    Args:
        node: returns it.
        value: the gradient.
        to: the axes along which everyone gets it.
    """
    converter, rows = node.converter, value.sharded
    if value.is_partial and not value.gathers:
        total = node.builder.exchange(
            "sum",
            value.own,
            sizes=value.shape,
            to=to,
            round=node.operation.name,
        )
        if not to:
            value.whole = total
        return total
    if to and rows is not None and value.shards is None:
        return converter.gather_on_towers(value, rows)
    if to:
        return converter.replicate(value)
    return converter.assemble(value)


def _complete(
    node: Node, inputs: Values, outputs: Values, known: Sequence[Any] | None
) -> None:
    """Add the shapes of outputs, and their known entries."""
    shapes = _symbolic_shapes(node, inputs)
    for index, value in enumerate(outputs):
        if known is not None and value.known is None:
            value.known = known[index]
        traced = node.shapes[index]
        if traced.rank is None or isinstance(value.layout, ListOf):
            continue
        sizes = list(sizes_of(traced))
        for shape in (value.shape, shapes[index]):
            if shape is not None and len(shape) == len(sizes):
                sizes = [
                    known if size is UNKNOWN else size
                    for size, known in zip(sizes, shape, strict=True)
                ]
        if value.sharded is not None:
            sizes[value.sharded.axis] = value.sharded.size
        value.shape = tuple(sizes)


def _has_rows_and_shards(inputs: Values) -> bool:
    """Whether inputs have both rows of examples and rows of variables."""
    layouts = [value.sharded for value in inputs if value.sharded is not None]
    return len({layout.of_variables for layout in layouts}) == 2


def _symbolic_shapes(node: Node, inputs: Values) -> Sequence[Shape | None]:
    """Derive the global shapes of outputs with unknown sizes."""
    unknown, facts = [None] * node.num_outputs, node.facts
    if all(shape.is_fully_defined() for shape in node.shapes):
        return unknown
    with contextlib.suppress(NotDivided):
        if facts.shape is not None:
            return [facts.shape(node, *inputs)] * node.num_outputs
        if facts.labels and all(v.shape is not None for v in inputs):
            return facts.labels(node, *inputs).shapes(inputs)
    return unknown


def sort_topologically(
    operations: Sequence[Any], known: Mapping[str, Any]
) -> Iterator[tf.Operation]:
    """Yield operations in topological order.

    The bodies of some loops list them in another order.
    """
    done: set[str] = set()
    for operation in operations:
        waiting = [operation]
        while waiting:
            last = waiting[-1]
            if last.name in done:
                waiting.pop()
                continue
            pending = [
                tensor.op
                for tensor in last.inputs
                if tensor.op.name not in done and tensor.name not in known
            ]
            if pending:
                waiting += pending
                continue
            done.add(waiting.pop().name)
            yield last
