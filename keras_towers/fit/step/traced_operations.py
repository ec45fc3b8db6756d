"""The operations of a traced step, in a form that ranks can compare.

Each operation has a checksum of its type and attributes, of the functions it
calls, and of the checksums of its inputs. Left out are names, devices, prints
and summaries, and the values of constants, which ``traced_constants.py``
compares.
"""

from __future__ import annotations

import collections
import hashlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import keras
import tensorflow as tf

from keras_towers import compat
from keras_towers.fit.ranks.compared_step import Operations, OperationText
from keras_towers.fit.step.code_lines import line_of
from keras_towers.fit.step.trace import Trace, handle_of
from keras_towers.fit.weights.model_state import ModelState, collect

if TYPE_CHECKING:
    from tensorflow.core.framework.attr_value_pb2 import AttrValue

# Attributes that only name or count objects of a process; the numbers of draws
# without a seed, which rank 0 makes; and those that the inputs of a call imply.
_IGNORED = frozenset(
    [
        "container",
        "shared_name",
        "token",
        "message",
        "seed",
        "seed2",
        "config",
        "config_proto",
        "executor_type",
        "Tin",
    ]
)

# Tells the inputs of an operation apart.
_PLACES = 0x9E3779B97F4A7C15


class TracedOperations:
    """The operations on which results and variables of a step depend.

    Args:
        traced: the step.
        model: the model that runs it.

    Attributes:
        described: them, as ranks compare them, without the trace. The checksum
            is equal on all ranks that have traced the same step.
        places: of constants and captured tensors, by their ids: a number that
            tells where the step uses them.
        first_uses: of the same: the index of the operation that first uses
            what is computed of constants alone.
        tracebacks: those of the operations, which share them.
    """

    def __init__(self, traced: Trace, model: keras.Model):
        self._needed = traced.needed_by_graph
        # In the order of the step, but for those of functions, which come
        # before they are called.
        self._checksums: list[int] = []
        self._texts: list[OperationText] = []
        self.tracebacks: dict[Any, Any] = {}
        self._content: dict[int, bytes] = {}
        self.places: collections.Counter[int] = collections.Counter()
        self.first_uses: dict[int, int] = {}
        self._captured = {
            id(inside)
            for inside, _ in traced.needed_captures
            if inside.dtype.is_numpy_compatible
        }
        self._notes = _describe_updates(traced, model)
        if traced.segments is not None:
            paths = traced.segments.paths
            self._notes |= {k: repr(v).encode() for k, v in paths.items()}
        self._add(traced.graph, _name_inputs(traced, model), traced.results)
        results = self._content[id(traced.graph)]
        # Ranks exchange what operations return in the order of these.
        total = _number(_digest(repr(self._checksums).encode(), results))
        self.described: Operations = Operations.of(
            total % 2**32, self._checksums, self._texts
        )

    def _add(
        self,
        graph: tf.Graph,
        inputs: dict[int, bytes],
        results: list[tf.Tensor],
    ) -> None:
        """Add the needed operations of a graph.

        Args:
            graph: the graph.
            inputs: what identifies its inputs, by the ids of their tensors.
            results: what it returns.
        """
        values, needed = dict(inputs), self._needed[graph]
        # The constants, with their places, of results that depend on no input.
        constants = {t: {t: 0} for t in inputs if t in self._captured}
        for operation in graph.get_operations():
            if operation.name not in needed:
                continue
            outputs = operation.outputs
            if operation.type == "Placeholder" and id(outputs[0]) in inputs:
                continue
            operands = [id(tensor) for tensor in operation.inputs]
            checksum = self._checksum(operation, operands, values)
            number = _number(checksum)
            self._checksums.append(number)
            self._texts.append(_describe(operation, self.tracebacks))
            for index, tensor in enumerate(outputs):
                values[id(tensor)] = checksum + bytes([index % 256])
            used: collections.Counter[int] = collections.Counter()
            for index, tensor in enumerate(operands, 1):
                for constant, place in constants.get(tensor, {}).items():
                    used[constant] += _PLACES * place + index
            if operation.type == "Const":
                constants[id(outputs[0])] = {id(outputs[0]): 0}
            elif operands and all(tensor in constants for tensor in operands):
                constants |= {id(tensor): used for tensor in outputs}
            else:
                for constant, place in used.items():
                    self.places[constant] += number + _PLACES * place
                    index = len(self._checksums) - 1
                    self.first_uses.setdefault(constant, index)
        returned = [values.get(id(tensor), b"") for tensor in results]
        self._content[id(graph)] = _digest(*returned)

    def _checksum(
        self,
        operation: tf.Operation,
        operands: list[int],
        values: dict[int, bytes],
    ) -> bytes:
        """Return the checksum of an operation, given those of its inputs."""
        graph, type_ = operation.graph, operation.type
        if compat.op_definition(type_) is None:
            parts = [self._of_function(graph, type_)]
        else:
            parts = [type_.encode(), self._notes.get(operation.name, b"")]
        for name, value in _attributes(operation):
            parts.append(name.encode())
            kind = value.WhichOneof("value")
            if kind == "func":
                parts.append(self._of_function(graph, value.func.name))
            elif kind == "tensor":
                parts.append(value.tensor.tensor_shape.SerializeToString())
            elif value.list.func:
                names = [function.name for function in value.list.func]
                parts += [self._of_function(graph, name) for name in names]
            else:
                parts.append(value.SerializeToString(deterministic=True))
        # An argument that only a summary uses has no checksum.
        parts += [values.get(tensor, b"") for tensor in operands]
        return _digest(*filter(None, parts))

    def _of_function(self, graph: tf.Graph, name: str) -> bytes:
        """Return the checksum of a function, whatever its name."""
        called = compat.graph_of_function(graph, name)
        if called is None or called not in self._needed:
            return b"function"
        if id(called) not in self._content:
            needed = self._needed[called]
            used = [t for t in called.inputs if t.op.name in needed]
            inputs = {id(t): b"input %d" % k for k, t in enumerate(used)}
            self._add(called, inputs, called.outputs)
        return self._content[id(called)]


def _describe(
    operation: tf.Operation, tracebacks: dict[Any, Any]
) -> OperationText:
    outputs = [
        f"{tensor.dtype.name} {tensor.shape}"
        for tensor in operation.outputs
        if tensor.dtype not in (tf.resource, tf.variant)
    ]
    attributes = {
        name: str(operation.get_attr(name))
        for name, value in _attributes(operation)
        if value.WhichOneof("value") not in ("func", "type", "tensor")
    }
    result = " ".join((operation.type, *outputs[:1]))
    return OperationText(result, attributes, line_of(operation, tracebacks))


def _attributes(operation: tf.Operation) -> Iterator[tuple[str, AttrValue]]:
    """Yield the attributes that say what an operation computes."""
    attributes = operation.node_def.attr
    for name in sorted(attributes):
        if name[0] != "_" and name not in _IGNORED:
            yield name, attributes[name]


def _name_inputs(traced: Trace, model: keras.Model) -> dict[int, bytes]:
    """Return what identifies the inputs of a step, by the ids of tensors.

    Variables have their place in the model, or among those outside of it.
    """
    places = {id(handle): name for handle, name in _places_of(collect(model))}
    outside = traced.variables_outside(model)
    places |= {id(h): b"outside %d" % k for k, h in enumerate(outside)}
    first = len(traced.graph.inputs) - len(traced.captures)
    names = {
        id(tensor): b"batch %d" % k
        for k, tensor in enumerate(traced.graph.inputs[:first])
    }
    for inside, tensor in traced.needed_captures:
        other = f"{inside.dtype.name} {inside.shape}".encode()
        names[id(inside)] = places.get(id(tensor), other)
    return names


def _places_of(state: ModelState) -> Iterator[tuple[tf.Tensor | None, bytes]]:
    """Yield the handles of a model's variables, with their places."""
    for kind, variables in (
        ("seed", state.seeds),
        ("weight", state.weights),
        ("metric", state.metrics),
        ("slot", state.optimizer_variables),
    ):
        for k, variable in enumerate(variables):
            yield handle_of(variable), f"{kind} {k}".encode()


def _describe_updates(traced: Trace, model: keras.Model) -> dict[str, bytes]:
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
        ).encode()
        for name, call in traced.updates.items()
    }


def _digest(*parts: bytes) -> bytes:
    return hashlib.blake2b(b"\0".join(parts), digest_size=8).digest()


def _number(digest: bytes) -> int:
    return int.from_bytes(digest, "little")
