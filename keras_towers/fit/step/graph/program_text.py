"""The canonical text of a traced step, by which ranks compare it.

What rank 0 computes is the program. Its text has a line for each operation on
which results or variables depend, in their order: the type and attributes, the
lines that its inputs come from and, of a constant, the value. Left out is what
may differ: names, devices, prints and summaries; the seeds of draws, which rank
0 makes; the values of variables, which all take from rank 0; static shapes,
unless an operation is another one for them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import keras
import numpy as np
import tensorflow as tf

from keras_towers.fit.ranks.compared_step import (
    Line,
    ProgramText,
    line_of_exchange,
)
from keras_towers.fit.step.graph.code_lines import SharedLines
from keras_towers.fit.step.graph.trace import Trace, handle_of
from keras_towers.fit.weights.model_state import ModelState, collect
from keras_towers.foundation import compat
from keras_towers.jobs.rendezvous.rank_checks import CONSTANT
from keras_towers.partition.ir.effects import Effect, effect_of

if TYPE_CHECKING:
    from tensorflow.core.framework.attr_value_pb2 import AttrValue

# Attributes that only name or count objects of a process, and those that the
# inputs of a call imply.
_IGNORED = frozenset(
    [
        *("container", "shared_name", "token", "message", "Tin"),
        *("config", "config_proto", "executor_type"),
    ]
)
_SEEDS = frozenset(["seed", "seed2"])
_SHOWN = 4


def text_of(
    traced: Trace, model: keras.Model, exchanged: Sequence[str] = ()
) -> ProgramText:
    """Return the text of a step.

    Args:
        traced: the step.
        model: the model that runs it.
        exchanged: describes what ranks exchange, in its order.
    """
    return _Writer(traced, model).write(exchanged)


class _Writer:
    """Writes the text of a step."""

    def __init__(self, traced: Trace, model: keras.Model):
        self._traced = traced
        self._needed = traced.needed_by_graph
        self._model = model
        # Those of a function come before the first operation that calls it.
        self._lines: list[tuple[bytes, Line]] = []
        self._reals: dict[int, np.ndarray] = {}
        # The numbers of functions, whatever their names.
        self._functions: dict[int, str] = {}
        self._code = SharedLines()
        self._notes = _describe_updates(traced, model)
        if traced.segments is not None:
            self._notes |= {
                k: repr(v) for k, v in traced.segments.paths.items()
            }

    def write(self, exchanged: Sequence[str]) -> ProgramText:
        """Write the text."""
        traced = self._traced
        inputs = dict(self._inputs())
        self._add_graph(traced.graph, inputs, traced.results)
        self._lines += map(line_of_exchange, exchanged)
        return ProgramText.of(self._lines, self._reals)

    def _inputs(self) -> Iterator[tuple[int, str]]:
        """Yield what identifies the inputs of the step, by ids of tensors.

        Variables have their place in the model, or among those outside of it.
        """
        traced, model = self._traced, self._model
        places = {id(h): name for h, name in _places_of(collect(model))}
        outside = traced.variables_outside(model)
        places |= {id(h): f"outside {k}" for k, h in enumerate(outside)}
        tables = traced.fixed_tables
        first = len(traced.graph.inputs) - len(traced.captures)
        for k, tensor in enumerate(traced.graph.inputs[:first]):
            yield id(tensor), f"batch {k}"
        for k, (inside, tensor) in enumerate(traced.needed_captures):
            # TensorFlow captures large constants.
            if tensor.dtype.is_numpy_compatible and not tf.is_symbolic_tensor(
                tensor
            ):
                # NumPy's own texts lose zeros at their ends.
                kind = object if tensor.dtype == tf.string else None
                value = np.asarray(tensor.numpy(), kind)
                self._add_constant(inside.op, value)
                yield id(inside), f"constant {len(self._lines) - 1}"
                continue
            name = places.get(id(tensor), f"{k} {inside.dtype.name}")
            table = tables.get(id(tensor))
            if table is not None:
                self._add(f"{name} {table}", Line(table, {}))
            yield id(inside), name

    def _add_graph(
        self, graph: tf.Graph, inputs: dict[int, str], results: list[tf.Tensor]
    ) -> None:
        """Add the needed operations of a graph.

        Args:
            graph: the graph.
            inputs: what identifies its inputs, by the ids of their tensors.
            results: what it returns.
        """
        values, needed = dict(inputs), self._needed[graph]

        def names(tensors: Sequence[tf.Tensor]) -> list[str]:
            # An argument that only a summary uses has no name.
            return [values[id(t)] for t in tensors if id(t) in values]

        for operation in graph.get_operations():
            outputs = operation.outputs
            if operation.name not in needed or (
                operation.type == "Placeholder" and id(outputs[0]) in inputs
            ):
                continue
            if operation.type == "Const":
                value = tf.make_ndarray(operation.get_attr("value"))
                self._add_constant(operation, value)
            else:
                self._add_operation(operation, names(operation.inputs))
            number = len(self._lines) - 1
            for index, tensor in enumerate(outputs):
                values[id(tensor)] = f"{operation.type} {number}:{index}"
        # Ranks exchange what operations return in the order of these.
        self._functions[id(graph)] = f"function {len(self._functions)}"
        shown = {"of": ", ".join(names(results))}
        self._add(f"return {shown}", Line("the results", shown))

    def _add(self, text: str, line: Line) -> None:
        self._lines.append((text.encode(), line))

    def _add_constant(self, operation: tf.Operation, value: np.ndarray) -> None:
        text, content = f"Const {value.dtype} {value.shape} ".encode(), b""
        if value.dtype.kind == "O":
            content = repr(value.tolist()).encode()
        elif value.dtype.kind in "biu" or value.dtype.names:
            content = value.tobytes()
        else:
            self._reals[len(self._lines)] = value
        shown = [str(number) for number in value.ravel()[:_SHOWN]]
        shown += ["..."] if value.size > _SHOWN else []
        dtype = operation.outputs[0].dtype.name
        result = f"{CONSTANT} {dtype} {value.shape} {' '.join(shown)}"
        line = Line(result, {}, self._code.line_of(operation))
        self._lines.append((text + content, line))

    def _add_operation(
        self, operation: tf.Operation, operands: list[str]
    ) -> None:
        type_, graph = operation.type, operation.graph
        if compat.op_definition(type_) is None:
            type_ = self._function(graph, type_)
        texts, shown = [type_, self._notes.get(operation.name, "")], {}
        for name, value in _attributes(operation):
            kind = value.WhichOneof("value")
            if kind == "func":
                texts.append(self._function(graph, value.func.name))
            elif value.list.func:
                called = value.list.func
                texts += [self._function(graph, f.name) for f in called]
            elif kind == "type":
                texts.append(f"{name}={value.type}")
            elif kind is not None:
                shown[name] = str(getattr(value, kind)).replace("\n", " ")
        shown["inputs"] = ", ".join(operands)
        texts += [f"{name}={given}" for name, given in shown.items()]
        outputs = [
            f"{tensor.dtype.name} {tensor.shape}"
            for tensor in operation.outputs
            if tensor.dtype not in (tf.resource, tf.variant)
        ]
        result = " ".join((operation.type, *outputs[:1]))
        code = self._code.line_of(operation)
        self._add(" ".join(texts), Line(result, shown, code))

    def _function(self, graph: tf.Graph, name: str) -> str:
        """Return the number of a function, whose body comes before it."""
        called = compat.graph_of_function(graph, name)
        if called is None or called not in self._needed:
            return "function"
        if id(called) not in self._functions:
            needed = self._needed[called]
            used = [t for t in called.inputs if t.op.name in needed]
            inputs = {id(t): f"input {k}" for k, t in enumerate(used)}
            self._add_graph(called, inputs, called.outputs)
        return self._functions[id(called)]


def _attributes(operation: tf.Operation) -> Iterator[tuple[str, AttrValue]]:
    """Yield the attributes that say what an operation computes."""
    attributes = operation.node_def.attr
    ignored = _IGNORED
    if (
        not _SEEDS.isdisjoint(attributes)
        and effect_of(operation) is Effect.EXTERNAL
    ):
        ignored = _IGNORED | _SEEDS
    for name in sorted(attributes):
        if name[0] != "_" and name not in ignored:
            yield name, attributes[name]


def _places_of(state: ModelState) -> Iterator[tuple[tf.Tensor | None, str]]:
    """Yield the handles of a model's variables, with their places."""
    for kind, variables in (
        ("seed", state.seeds),
        ("weight", state.weights),
        ("metric", state.metrics),
        ("slot", state.optimizer_variables),
    ):
        for k, variable in enumerate(variables):
            yield handle_of(variable), f"{kind} {k}"


def _describe_updates(traced: Trace, model: keras.Model) -> dict[str, str]:
    """Return what each optimizer updates, by the name of what it gets."""
    state = collect(model)
    weights = {id(v): k for k, v in enumerate(state.weights)}
    optimizers = {id(o): k for k, o in enumerate(state.optimizers)}
    return {
        name: repr(
            (
                optimizers.get(id(call.optimizer)),
                [weights.get(id(variable)) for variable in call.variables],
                [gradient is None for gradient in call.grads],
            )
        )
        for name, call in traced.updates.items()
    }
