"""A rehearsal of a step that is not proven to split.

The trace that was analysed runs once more, after the first step: on a few
examples of its batch as on one device, and on parts of them as on towers. It
works on copies of the variables that it writes, and random numbers are the same
constant for all examples, so that it changes nothing and compares nothing that
differs by design.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from keras_towers import compat, settings
from keras_towers.fit.capture import checks, splits
from keras_towers.fit.capture.compare import Ran, Together
from keras_towers.fit.capture.pieces import Exchange, Exchanges, Pieces
from keras_towers.fit.capture.trace import TracedStep
from keras_towers.fit.context.tower import Run
from keras_towers.fit.data import batches as data_lib
from keras_towers.fit.weights.variables import TowerVariable
from keras_towers.splitting import Analysis, marks

_HOST = "CPU:0"
_ROWS, _PARTS = 7, 3
# Steps may amplify rounding, of which nothing is known here.
_IN_HALF_PRECISION, _IN_SINGLE_PRECISION = 3e-2, 1e-3
_FLOATS = frozenset(
    (
        *("StatelessRandomUniformV2", "StatelessRandomNormalV2"),
        "StatelessTruncatedNormalV2",
    )
)
# What takes the place of what differs by design.
_BY_DESIGN: dict[str | None, float] = {
    marks.GRANTED: 0.5,
    marks.GRADIENT_THROUGH_GRANTED: 0.0,
}


class CannotRehearse(Exception):
    """The step is not rehearsed: it "took too long to trace", for example."""


@dataclasses.dataclass(frozen=True)
class Found:
    """The result of a rehearsal on a number of examples."""

    examples: int
    # The largest relative difference from one device; 0: only rounding.
    size: float = 0.0
    # The error of a tower's part of the examples; nothing is known then.
    failure: str = ""


class Rehearsal:
    """Runs a trace on a few examples, whole and in parts."""

    def __init__(
        self, trace: TracedStep, analysis: Analysis, predicts: bool = False
    ):
        self._trace, graph, self._predicts = trace, trace.graph, predicts
        self._open = [d for d in analysis.differences if d.is_open]
        self._captures = trace.captures[trace.tower.local_index]
        self._copied = _written(graph)
        self._check(analysis)
        self._pieces = _pieces_of(trace, analysis)
        self._form: Any = None
        self._is_kept = compat.hidden_variable(_HOST, False)
        self._kept: list[tf.Variable] = []

    def _check(self, analysis: Analysis) -> None:
        trace = self._trace
        if trace.way == "xla" or analysis.effects:
            raise CannotRehearse("is compiled by XLA, or has effects")
        if trace.seconds > settings.REHEARSED_TRACE_S:
            raise CannotRehearse("took too long to trace")
        if any(map(tf.is_symbolic_tensor, self._captures)):
            raise CannotRehearse("uses tensors of an outer function")
        try:
            checks.check_operations(trace.graph)
        except checks.CannotShare as error:
            raise CannotRehearse(str(error)) from error

    def keep(self, data: Any) -> None:
        """Keep a few examples of the first batch, in the graph of the step."""
        self._form = data
        leaves = _tensors(data)
        with compat.outside(_HOST):
            self._kept = [
                tf.Variable(
                    tf.zeros([0], leaf.dtype),
                    shape=tf.TensorShape(None),  # pyright: ignore[reportArgumentType]
                    trainable=False,
                )
                for leaf in leaves
            ]

        def keep() -> Any:
            few = data_lib.few_rows(data, _ROWS)
            pairs = zip(self._kept, _tensors(few), strict=True)
            for variable, value in (*pairs, (self._is_kept, tf.constant(True))):
                # No variable that the step itself writes.
                tf.raw_ops.AssignVariableOp(
                    resource=variable.handle, value=value
                )
            return True

        tf.cond(self._is_kept, lambda: True, keep)

    @property
    def has_examples(self) -> bool:
        """Whether a step has run since it began to keep examples."""
        return bool(self._is_kept.numpy())

    def run(self) -> Found | None:
        """Run the trace; return the result, or None if it shows nothing."""
        with compat.outside(_HOST):
            data = self._examples()
            examples = int(data_lib.batch_size_of(data))
            if examples < _PARTS:
                raise CannotRehearse("gets too few examples")
            parts = data_lib.split(data, _PARTS).pieces
            sizes = [int(data_lib.batch_size_of(part)) for part in parts]
            shares = [size / examples for size in sizes]
            starts = [sum(sizes[:number]) for number in range(_PARTS)]
            whole, *_ = self._ran([(data, 1.0, 0)], examples)
            try:
                given = list(zip(parts, shares, starts, strict=True))
                towers = self._ran(given, examples)
            except tf.errors.OpError as error:
                return Found(examples, failure=type(error).__name__)
            results = splits.results_of(self._trace, self._predicts)
            merges = {
                key: owner.merge if isinstance(owner, TowerVariable) else None
                for key, owner in splits.owners_of(self._trace).items()
            }
            compared = Together(results, merges, whole, towers, shares)
            size = compared.difference(self._open)
        if size is None:
            return None
        half = any(
            tensor.dtype in (tf.float16, tf.bfloat16)
            for operation in self._trace.graph.get_operations()
            for tensor in operation.outputs
        )
        rounding = _IN_HALF_PRECISION if half else _IN_SINGLE_PRECISION
        return Found(examples, size if size > rounding else 0.0)

    def _examples(self) -> Any:
        """Return the examples that were kept, and free their memory."""
        kept = [variable.read_value() for variable in self._kept]
        for variable in self._kept:
            # The graph of the step keeps it.
            variable.assign(tf.zeros([0], variable.dtype))
        leaves = [
            kept.pop(0) if isinstance(leaf, tf.Tensor) else leaf
            for leaf in checks.leaves_of(self._form)
        ]
        return tf.nest.pack_sequence_as(
            self._form, leaves, expand_composites=True
        )

    def _ran(
        self, towers: Sequence[tuple[Any, float, int]], total: int
    ) -> list[Ran]:
        """Run the trace as K towers do, of a batch of ``total`` examples."""
        # Each tower has examples, their fraction of the batch and the index of
        # the first.
        every = []
        before: list[dict[str, Any]] = [{} for _ in towers]
        copies: list[dict[str, tf.Variable]] = [{} for _ in towers]
        for number, given in enumerate(towers):
            inputs = self._inputs(*given, total)
            for handle, (_, inside) in zip(
                self._captures, self._trace.graph.captures, strict=True
            ):
                if inside.name in self._copied:
                    value = _value_of(handle, inside)
                    before[number][inside.name] = value
                    copy = tf.Variable(value, trainable=False)
                    copies[number][inside.name] = copy
                    handle = copy.handle
                inputs.append(handle)
            every.append(inputs)
        names = [tensor.name for tensor in self._trace.results]
        return [
            Ran(
                dict(zip(names, outputs, strict=True)),
                before[number],
                {key: v.read_value() for key, v in copies[number].items()},
            )
            for number, outputs in enumerate(
                self._pieces.together(every, _exchanged)
            )
        ]

    def _inputs(
        self, data: Any, share: float, start: int, total: int
    ) -> list[Any]:
        """Return the inputs of the trace, without its captures."""
        trace, tower = self._trace, self._trace.tower
        numbers: list[Any] = []
        if isinstance(tower.share, tf.Tensor):
            numbers.append(share)
        if isinstance(tower.live, tf.Tensor):
            numbers.append(True)
        if tower.rows is not None:
            numbers += [start, total]
        inputs = _tensors(data)
        own = len(trace.graph.inputs) - len(trace.graph.captures)
        places = trace.graph.inputs[len(inputs) : own]
        # The trace may know the total.
        return inputs + [
            tf.cast(number, place.dtype)
            for number, place in zip(numbers, places, strict=False)
        ]


def _tensors(data: Any) -> list[Any]:
    return [x for x in checks.leaves_of(data) if isinstance(x, tf.Tensor)]


def _written(graph: Any) -> set[str]:
    """Return the names of captured variables that are not only read."""
    read = {graph.inputs[index].name for index in compat.only_read(graph)}
    return {
        inside.name
        for _, inside in graph.captures
        if checks.is_variable(inside) and inside.name not in read
    }


def _value_of(handle: Any, inside: Any) -> Any:
    """Read a variable by its handle; the trace's own handle has its dtype."""
    data = compat.get_resource_handle_data(inside)
    dtype = tf.as_dtype(data.shape_and_type[0].dtype)
    return tf.raw_ops.ReadVariableOp(resource=handle, dtype=dtype)


def _pieces_of(trace: TracedStep, analysis: Analysis) -> Pieces:
    """Return a trace as functions, without what differs by design."""
    graph, exchanges = trace.graph, Exchanges(trace.exchanges.all)
    for draw in analysis.draws:
        operation = draw.operation
        if operation.type not in _FLOATS or operation.graph is not graph:
            raise CannotRehearse(f"draws by {operation.type}")
        shape = operation.inputs[0]
        exchanges.replace(operation, [shape], _filled(operation, 0.5))
    for operation in graph.get_operations():
        # A tower's own examples give these by design, such as the statistics of
        # BatchNormalization.
        number = _BY_DESIGN.get(marks.meaning_in(operation.node_def))
        if number is not None:
            like = _filled(operation, number, like=True)
            exchanges.replace(operation, list(operation.inputs), like)
    if any(
        marks.meaning_in(node) in _BY_DESIGN
        for function in graph.as_graph_def().library.function
        for node in function.node_def
    ):
        raise CannotRehearse("does by design in a function what differs")
    return Pieces(graph, exchanges.all, "inlined", [])


def _exchanged(
    exchange: Exchange, every: list[list[Any]]
) -> list[list[Any]] | None:
    """Return the results of an exchange for each of K towers."""
    if not exchange.meanings:
        return None
    if "gather" not in exchange.meanings:
        whole = [tf.add_n(tensors) for tensors in zip(*every, strict=True)]
        for index, meaning in enumerate(exchange.meanings):
            if meaning == "mean":
                whole[index] /= len(every)
        return [whole for _ in every]
    rows = [[len(tensor) for tensor in given[1:]] for given in every]
    wholes = [
        tf.concat(tensors, 0) for tensors in list(zip(*every, strict=True))[1:]
    ]
    firsts = [
        [sum(before) for before in zip(*rows[:number], strict=True)]
        or [0] * len(wholes)
        for number in range(len(every))
    ]
    return [
        [*wholes, *first, *count]
        for first, count in zip(firsts, rows, strict=True)
    ]


def _filled(operation: Any, number: float, like: bool = False) -> Run:
    """Return a function that fills a given shape, or that of a given tensor."""
    dtype = operation.outputs[0].dtype

    def run(given: list[tf.Tensor]) -> list[Any]:
        shape = tf.shape(given[0]) if like else given[0]
        return [tf.fill(shape, tf.constant(number, dtype))]

    return run
