"""The trace of a step that exchanges values, cut where it does.

Towers wait for one another where they exchange values. The trace is therefore
cut into pieces: the first needs no exchanged value, the second the values that
are exchanged after the first, and so on. Effects that happen once for all
towers happen between pieces, too.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import tensorflow as tf

from keras_towers import compat
from keras_towers.fit.capture import once
from keras_towers.fit.capture.function import GraphFunction, Way
from keras_towers.fit.context.tower import Exchanged, Run
from keras_towers.splitting import Effect
from keras_towers.splitting.marks import marked


@dataclasses.dataclass(frozen=True, eq=False)
class Exchange:
    """An exchange in a trace, or an operation that happens once."""

    given: Sequence[Any]
    # Placeholders of the results, and the tensors that the results follow from.
    results: Sequence[Any]
    of: Sequence[Any]
    # None: the operation ``once`` happens instead.
    run: Run | None
    once: Any = None
    # Of the results, in the analysis; empty where towers do not meet.
    meanings: Sequence[str] = ()

    @property
    def after(self) -> list[Any]:
        """The operations that come before the exchange."""
        before = [] if self.once is None else list(self.once.control_inputs)
        return [tensor.op for tensor in self.given] + before

    @property
    def operations(self) -> set[str]:
        """The names of the operations in whose place the exchange happens."""
        if self.once is not None:
            return {self.once.name}
        return {tensor.op.name for tensor in self.results}


class Exchanges:
    """The exchanges in the trace of a step, in their order."""

    def __init__(self, known: Sequence[Exchange] = ()) -> None:
        self.all: list[Exchange] = list(known)

    def note(
        self, results: Sequence[Exchanged], given: list[tf.Tensor], run: Run
    ) -> list[tf.Tensor]:
        """Note an exchange, and return placeholders of its results."""
        stand = [
            marked(_unknown(result.of, result.shape), result.meaning)
            for result in results
        ]
        of = [result.of for result in results]
        meanings = [result.meaning for result in results]
        self.all.append(Exchange(list(given), stand, of, run, None, meanings))
        return stand

    def replace(
        self, operation: Any, given: Sequence[tf.Tensor], run: Run
    ) -> None:
        """Note a computation that takes the place of an operation."""
        results = list(operation.outputs)
        self.all.append(Exchange(list(given), results, results, run))

    def note_once(self, effects: Sequence[Effect], here: bool) -> None:
        """Note an operation that happens once; ``here``: on this rank."""
        operation = effects[0].at
        given = list({t.name: t for t in operation.inputs}.values())
        results = list(operation.outputs)
        run = None if here else once.called(None)
        self.all.append(Exchange(given, results, results, run, operation))


def _unknown(tensor: tf.Tensor, shape: tf.TensorShape) -> Any:
    """Return a tensor that TensorFlow does not take for a constant."""
    return tf.raw_ops.PlaceholderWithDefault(input=tensor, shape=shape)


# Exchanges the K towers' values, given all of them; None: each tower does.
Meet: TypeAlias = Callable[
    [Exchange, list[list[Any]]], "list[list[Any]] | None"
]


class Pieces:
    """A traced step as functions of tensors, with exchanges between them."""

    def __init__(
        self,
        graph: Any,
        exchanges: Sequence[Exchange],
        way: Way,
        shapes: Sequence[tf.TensorShape],
    ):
        self._graph = graph
        place = _places(graph, exchanges)
        at = [
            max((place[operation.name] for operation in e.after), default=0)
            for e in exchanges
        ]
        last = 1 + max(at, default=-1)
        cut = _Cut(graph, exchanges, place)
        self._rounds: list[list[tuple[Exchange, Run]]]
        self._rounds = [[] for _ in range(last + 1)]
        for number, exchange in zip(at, exchanges, strict=True):
            run = exchange.run or once.called(
                GraphFunction(cut.alone(exchange), "inlined")
            )
            self._rounds[number].append((exchange, run))
        # ``shapes`` of the first inputs may be better known than to the graph.
        known = {t.name: s for t, s in zip(graph.inputs, shapes, strict=False)}
        self._pieces = []
        for number in range(last + 1):
            piece, inputs, outputs = cut.piece(number)
            sizes: list[Any] = [
                known.get(name, tensor.shape)
                for name, tensor in zip(inputs, piece.inputs, strict=True)
            ]
            ends = [*piece.outputs, *piece.control_outputs]
            function = GraphFunction(piece, way, sizes) if ends else _nothing
            self._pieces.append((function, inputs, outputs))

    def __call__(self, inputs: Sequence[Any]) -> list[Any]:
        """Run the step, and return the outputs of its graph."""
        return self.together([inputs], lambda exchange, every: None)[0]

    def together(
        self, every: Sequence[Sequence[Any]], meet: Meet
    ) -> list[list[Any]]:
        """Run the step of K towers, given K inputs; return K outputs."""
        towers = [
            {
                tensor.name: value
                for tensor, value in zip(
                    self._graph.inputs, inputs, strict=True
                )
            }
            for inputs in every
        ]
        for (function, names, outputs), round_ in zip(
            self._pieces, self._rounds, strict=True
        ):
            for values in towers:
                results = function([values[name] for name in names])
                values.update(zip(outputs, results, strict=True))
            for exchange, run in round_:
                given = [
                    [values[tensor.name] for tensor in exchange.given]
                    for values in towers
                ]
                found = meet(exchange, given) or [run(own) for own in given]
                for values, own in zip(towers, found, strict=True):
                    for stand, value in zip(exchange.results, own, strict=True):
                        values[stand.name] = _as(value, stand)
        return [
            [values[tensor.name] for tensor in self._graph.outputs]
            for values in towers
        ]


def _nothing(inputs: Sequence[Any]) -> list[Any]:
    return []


def _as(value: Any, stand: Any) -> Any:
    if not isinstance(value, tf.Tensor):
        return tf.constant(value, stand.dtype)
    return value if value.dtype == stand.dtype else tf.cast(value, stand.dtype)


def _places(graph: Any, exchanges: Sequence[Exchange]) -> dict[str, int]:
    """Return the number of the piece that each operation belongs to."""
    given = {
        name: exchange.after
        for exchange in exchanges
        for name in exchange.operations
    }
    place: dict[str, int] = {}
    for operation in graph.get_operations():
        waiting = [operation]
        while waiting:
            last = waiting[-1]
            exchanged = given.get(last.name)
            ahead = exchanged
            if ahead is None:
                ahead = [t.op for t in last.inputs] + last.control_inputs
            missing = [o for o in ahead if o.name not in place]
            if missing:
                waiting += missing
                continue
            waiting.pop()
            latest = max((place[o.name] for o in ahead), default=0)
            place[last.name] = latest + (exchanged is not None)
    return place


class _Cut:
    """Makes a graph of each piece."""

    def __init__(
        self,
        graph: Any,
        exchanges: Sequence[Exchange],
        place: dict[str, int],
    ):
        self._graph = graph
        self._place = place
        definition = graph.as_graph_def()
        self._versions = definition.versions
        self._nodes = {node.name: node for node in definition.node}
        # They come from outside of every piece.
        self._outside = {tensor.op.name for tensor in graph.inputs}
        self._outside |= {name for e in exchanges for name in e.operations}
        self._members: dict[int, list[Any]] = {}
        self._needed: dict[int, dict[str, Any]] = {}
        wanted = [*graph.outputs, *(t for e in exchanges for t in e.given)]
        kept: dict[str, Any] = {t.name: t for t in wanted}
        for operation in graph.get_operations():
            if operation.name in self._outside:
                continue
            number = place[operation.name]
            self._members.setdefault(number, []).append(operation)
            for tensor in operation.inputs:
                if self._is_outside(tensor, number):
                    needed = self._needed.setdefault(number, {})
                    needed.setdefault(tensor.name, tensor)
                    kept.setdefault(tensor.name, tensor)
        self._kept = list(kept.values())

    def _is_outside(self, tensor: Any, number: int) -> bool:
        name = tensor.op.name
        return name in self._outside or self._place[name] != number

    def piece(self, number: int) -> tuple[Any, list[str], list[str]]:
        """Return a piece, and the names of its inputs and outputs."""
        operations = self._members.get(number, [])
        names = {operation.name for operation in operations}
        needed = self._needed.get(number, {})
        outputs = [t for t in self._kept if t.op.name in names]
        name = f"{self._graph.name}_{number}"
        result = self._graph_of(name, operations, needed, outputs)
        result.control_outputs = [
            result.get_operation_by_name(operation.name)
            for operation in self._graph.control_outputs
            if operation.name in names
        ]
        return result, list(needed), [tensor.name for tensor in outputs]

    def alone(self, exchange: Exchange) -> Any:
        """Return the graph of an operation that happens once."""
        operation, needed = exchange.once, {t.name: t for t in exchange.given}
        name = f"{self._graph.name}_once"
        result = self._graph_of(name, [operation], needed, exchange.results)
        result.control_outputs = [result.get_operation_by_name(operation.name)]
        return result

    def _graph_of(
        self,
        name: str,
        operations: Sequence[Any],
        needed: Mapping[str, Any],
        outputs: Sequence[Any],
    ) -> Any:
        names = {operation.name for operation in operations}
        definition = tf.compat.v1.GraphDef()
        definition.versions.CopyFrom(self._versions)
        for operation in operations:
            node = definition.node.add()
            node.CopyFrom(self._nodes[operation.name])
            inside = [
                entry
                for entry in node.input
                if not entry.startswith("^") or entry[1:] in names
            ]
            # It may name what is in another piece.
            node.attr.pop("_class", None)
            del node.input[:]
            node.input.extend(inside)
        result = compat.FuncGraph(name)
        # They would go with the graph that they belong to.
        compat.add_functions(result, self._graph)
        with result.as_default():
            inputs = {key: placeholder(t) for key, t in needed.items()}
            tf.graph_util.import_graph_def(
                definition, input_map=inputs, name=""
            )
        result.inputs = list(inputs.values())
        result.outputs = [
            result.get_tensor_by_name(tensor.name) for tensor in outputs
        ]
        for tensor, copy in zip(outputs, result.outputs, strict=True):
            # What it follows from may be in another piece.
            copy.set_shape(tensor.shape)
        result.structured_outputs = result.outputs
        return result


def placeholder(tensor: Any, shape: tf.TensorShape | None = None) -> Any:
    """Return a placeholder for another graph's tensor; None: of its shape."""
    copy = tf.compat.v1.placeholder(tensor.dtype, shape or tensor.shape)
    if tensor.dtype in (tf.resource, tf.variant):
        data = compat.get_resource_handle_data(tensor)
        compat.set_handle_data(copy, data)
    return copy
