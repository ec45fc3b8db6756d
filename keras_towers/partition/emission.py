"""Adds the operations of a program to a TensorFlow graph.

``fit/step/graph/tower_functions.py`` and ``tower_program.py`` call ``emit``;
``mesh.py`` does so for the graph of a column.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, TypeAlias

import tensorflow as tf

from keras_towers.foundation import compat
from keras_towers.partition.ir.program import Function, Operation, Tensor
from keras_towers.partition.xla.compiled_draws import CompiledDraws
from keras_towers.partition.xla.kernels import Kernels, rename_calls

Waits: TypeAlias = Mapping[Operation, Sequence[Operation]]
# The functions that were emitted are numbered.
_numbers = itertools.count()
# In the backward pass, rounds of a loop run ahead of the sums over rounds, and
# each then keeps its part of the gradient of every weight.
_ROUNDS, _MOST_ROUNDS = "parallel_iterations", 4


def emit(
    operations: Sequence[Operation],
    given: Mapping[Tensor, Any],
    wanted: Sequence[Tensor],
    graphs: Iterable[tf.Graph] = (),
    after: Sequence[object] = (),
    checks: list[Any] | None = None,
    names: dict[int, str] | None = None,
    kernels: Kernels | None = None,
    waits: Waits = MappingProxyType({}),
) -> list[tf.Tensor]:
    """Add operations to the current graph; return the wanted tensors.

    Operations keep their traced names, with a suffix if a name is taken.
    Repeated operations are added in each function that uses them.

    Args:
        operations: the operations, in order.
        given: graph tensors, by the tensors of the program that the operations
            use but do not compute.
        wanted: N tensors that are computed or given.
        graphs: the graphs whose functions are called.
        after: graph tensors for which operations with effects wait.
        checks: a list to which graph operations are added that have an effect
            but use no variable, such as assertions.
        names: gets the names of the operations, by their ids.
        kernels: what XLA compiles, of draws in functions that are called
            without it; None: nothing.
        waits: what operations wait for, as in ``Timeline``.
    """
    if not operations and all(tensor in given for tensor in wanted):
        return [given[tensor] for tensor in wanted]
    names = {} if names is None else names
    acts = any(operation.has_effect for operation in operations)
    gates = {f"^_gate{k}": tensor for k, tensor in enumerate(after) if acts}
    nodes = _Nodes(given, graphs, gates, names, kernels, waits)
    for operation in operations:
        if not operation.is_repeated:
            nodes.add(operation)
    ends = [
        None if tensor in given else nodes.name_of(tensor) for tensor in wanted
    ]
    acting = [
        names[id(operation)]
        for operation in operations
        if checks is not None
        and operation.has_effect
        and all(tensor.dtype != tf.resource for tensor in operation.inputs)
    ]
    made = nodes.add_to_graph([e for e in ends if e is not None] + acting)
    left = iter(made)
    results = [
        given[tensor] if end is None else next(left)
        for tensor, end in zip(wanted, ends, strict=True)
    ]
    if checks is not None:
        checks.extend(left)
    return results


@dataclasses.dataclass(eq=False)
class _Nodes:
    """Nodes that are added to the current graph all at once.

    Attributes:
        given: as for ``emit``.
        graphs: as for ``emit``.
        gates: what operations with effects wait for, by names.
        names: as for ``emit``.
        kernels: as for ``emit``.
        waits: as for ``emit``.
    """

    given: Mapping[Tensor, Any]
    graphs: Iterable[tf.Graph]
    gates: Mapping[str, object]
    names: dict[int, str]
    kernels: Kernels | None
    waits: Waits

    def __post_init__(self) -> None:
        self._here = compat.get_default_graph()
        for graph in self.graphs:
            compat.add_functions(self._here, graph._functions.values())
        self._definition = tf.compat.v1.GraphDef()
        self._definition.versions.CopyFrom(self._here.graph_def_versions)
        self._inputs: dict[str, Any] = {**self.gates}
        self._known: dict[Tensor, str] = {}
        self._draws = None
        if self.kernels is not None:
            self._draws = CompiledDraws(self._here, self.kernels)

    def name_of(self, tensor: Tensor) -> str:
        """Return the name of a given tensor, or of an operation's output."""
        operation, known = tensor.operation, self._known
        if tensor in self.given:
            if tensor not in known:
                known[tensor] = f"_given{len(known)}"
                self._inputs[known[tensor]] = self.given[tensor]
            return known[tensor]
        assert operation is not None, "a tensor without a source"
        if id(operation) not in self.names:
            assert operation.is_repeated, operation.type
            self.add(operation)
        return f"{self.names[id(operation)]}:{tensor.index}"

    def add(self, operation: Operation) -> None:
        """Add an operation, after the repeated ones that it uses."""
        # A repeated operation may use more of them.
        sources = [self.name_of(tensor) for tensor in operation.inputs]
        node = self._definition.node.add()
        traced = operation.name or operation.type
        name = self._here.unique_name(f"{traced}{operation.suffix}")
        node.name = self.names[id(operation)] = name
        node.op = operation.type
        if operation.device and "towers" not in operation.axes:
            node.device = operation.device
        node.input.extend(sources)
        if operation.has_effect:
            node.input.extend(self.gates)
        for other in self.waits.get(operation, ()):
            if id(other) in self.names:
                node.input.append(f"^{self.names[id(other)]}")
        for key, value in operation.attributes.items():
            node.attr[key].CopyFrom(value)
        if _ROUNDS in node.attr:
            rounds = node.attr[_ROUNDS]
            rounds.i = min(rounds.i, _MOST_ROUNDS)
        for key, functions in operation.functions.items():
            if isinstance(functions, Function):
                node.attr[key].func.name = self._added(functions)
                continue
            for function in functions:
                node.attr[key].list.func.add().name = self._added(function)
        if self._draws is not None:
            rename_calls(node.attr, self._draws.rename)

    def _added(self, function: Function) -> str:
        """Add a function to the current graph; return its name."""
        graph_of_function = graph_of(function, self.graphs)
        atomic = compat.function_module.from_func_graph(
            f"function_{next(_numbers)}", graph_of_function, {}
        )
        compat.add_functions(self._here, [atomic])
        return tf.compat.as_str(atomic.name)

    def add_to_graph(self, wanted: Sequence[str]) -> Sequence[Any]:
        """Add all nodes; return the tensors and operations of some names."""
        # TensorFlow cannot import a graph inside of control dependencies.
        with tf.control_dependencies(None):
            made = tf.graph_util.import_graph_def(
                self._definition,
                input_map=self._inputs,
                return_elements=wanted,
                name="",
            )
        return made or ()


def value_of(tensor: Tensor, given: Mapping[Tensor, Any]) -> tf.Tensor:
    """Return the graph tensor for a given tensor, or for a repeated one."""
    return emit([], given, [tensor])[0]


class FunctionGraph(compat.CompactGraph):
    """The graph of a function of a program, in use until a step is built."""


def graph_of(
    function: Function,
    graphs: Iterable[tf.Graph] = (),
    waits: Waits = MappingProxyType({}),
) -> tf.Graph:
    """Return the graph of a function.

    Args:
        function: the function.
        graphs: the graphs whose functions it calls.
        waits: what its operations wait for, as in ``Timeline``.
    """
    return graph_of_inputs(
        function.inputs,
        lambda known: emit(
            function.operations,
            known,
            function.outputs,
            graphs,
            waits=waits,
        ),
    )


def graph_of_inputs(
    inputs: Sequence[Tensor], add: Callable[[dict[Tensor, Any]], list[Any]]
) -> tf.Graph:
    """Return the graph of a function of tensors.

    Args:
        inputs: the function's inputs.
        add: adds operations to the current graph, given its placeholders by the
            inputs; returns the outputs.
    """
    graph = FunctionGraph("towers")
    with graph.as_default():
        placeholders = {tensor: placeholder_of(tensor) for tensor in inputs}
        graph.inputs = list(placeholders.values())
        # Keep the order of operations that use the same variables.
        with compat.AutomaticControlDependencies() as ordered:
            graph.outputs = add(placeholders)
    graph.control_outputs.extend(ordered.ops_which_must_run)
    graph.structured_outputs = graph.outputs
    return graph


def placeholder_of(tensor: Tensor, shape: Any = None) -> tf.Tensor:
    """Return a placeholder for a tensor, with the most specific known shape."""
    result = tf.compat.v1.placeholder(tensor.dtype, shape or tensor.shape)
    if tensor.handle is not None:
        compat.set_handle_data(result, tensor.handle)
    return result
