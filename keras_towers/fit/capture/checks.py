"""Checks that one trace of a step serves all towers; doubt counts as no."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import tensorflow as tf

from keras_towers import compat
from keras_towers.fit.contract import TowerConfig, UpdateCall
from keras_towers.fit.step.exchange import is_zero
from keras_towers.fit.weights import variables as variables_lib
from keras_towers.fit.weights.state import optimizers_in

# Of all operations with effects: those on variables, which are inputs of the
# trace, those that read tables, and those that contain others, which are looked
# at by themselves.
_HARMLESS = frozenset(
    (
        *("ReadVariableOp", "AssignVariableOp", "VariableShape"),
        *("AssignAddVariableOp", "AssignSubVariableOp", "ResourceGather"),
        *("ResourceGatherNd", "ResourceScatterAdd", "ResourceScatterUpdate"),
        *("StatefulPartitionedCall", "If", "While", "Case", "Assert"),
        *("CheckNumerics", "LookupTableFindV2", "LookupTableSizeV2", "Empty"),
    )
)


class CannotShare(Exception):
    """No trace serves all towers: the step "asks which tower it runs on"."""


class CannotSplit(CannotShare):
    """The step cannot be cut where its optimizer begins."""


def check_parts(
    pieces: Sequence[Any], shares: Sequence[Any], any_size: bool = False
) -> None:
    """Check that all towers get data of the same form."""
    forms = [_forms(piece, any_size) for piece in pieces]
    numbers = {share for share in shares if not tf.is_tensor(share)}
    # With ``any_size`` parts may have different numbers of examples.
    uneven = len(numbers) > 1 and not any_size
    if uneven or any(form != forms[0] for form in forms):
        raise CannotShare("gets parts of different sizes")


def common_shapes(pieces: Sequence[Any]) -> list[tf.TensorShape]:
    """Return the shapes of tensors as far as all towers share them."""
    shapes = []
    for tensors in zip(*map(leaves_of, pieces), strict=True):
        first = tensors[0]
        if isinstance(first, tf.Tensor):
            alike = all(tensor.shape == first.shape for tensor in tensors)
            hidden = first.shape.rank and [None, *first.shape[1:]]
            shapes.append(first.shape if alike else tf.TensorShape(hidden))
    return shapes


def leaves_of(structure: Any) -> list[Any]:
    """Flatten a structure, composite tensors included."""
    return tf.nest.flatten(structure, expand_composites=True)


def _form(leaf: Any, any_size: bool) -> Any:
    if not isinstance(leaf, tf.Tensor):
        return leaf
    sizes = list(leaf.shape or ())
    return leaf.dtype, leaf.shape.rank, sizes[1:] if any_size else sizes


def _forms(piece: Any, any_size: bool) -> list[Any]:
    """Return the properties of a part of the batch on which a trace depends."""
    # What consists of several tensors may keep their sizes to itself.
    whole = [
        tf.type_spec_from_value(leaf)
        for leaf in tf.nest.flatten(piece)
        if tf.is_tensor(leaf) and not isinstance(leaf, tf.Tensor)
    ]
    return whole + [_form(leaf, any_size) for leaf in leaves_of(piece)]


def check_operations(graph: Any, once: Iterable[Any] = ()) -> None:
    """Check that a trace, but for ``once``, does the same on every tower."""
    definition = graph.as_graph_def()
    functions = {f.signature.name: f for f in definition.library.function}
    apart = {operation.name for operation in once}
    nodes = [node for node in definition.node if node.name not in apart]
    for node in _with_functions(nodes, functions):
        if not _is_on_host(node.device):
            raise CannotShare(f"puts {node.op} on {node.device}")
        if node.op in functions or node.op in _HARMLESS:
            continue
        kind = compat.op_definition(node.op)
        if kind is None or kind.is_stateful:
            raise CannotShare(f"has effects not on variables: {node.op}")


def _is_on_host(device: str) -> bool:
    """Whether a device's name is empty, or a CPU of this process."""
    if not device:
        return True
    host = compat.eager_context().host_address_space()
    own = tf.DeviceSpec.from_string(host)
    asked = own.make_merged_spec(tf.DeviceSpec.from_string(device))
    of_process = asked.replace(device_type=None, device_index=None) == own
    return of_process and asked.device_type in (None, "CPU")


def _with_functions(
    nodes: Sequence[Any], functions: Mapping[str, Any]
) -> Iterator[Any]:
    """Yield nodes, and those of the functions that they call."""
    waiting = list(nodes)
    seen: set[str] = set()
    while waiting:
        node = waiting.pop()
        yield node
        called = {node.op}
        for value in node.attr.values():
            called |= {value.func.name, *(f.name for f in value.list.func)}
        for name in called & functions.keys() - seen:
            seen.add(name)
            waiting += functions[name].node_def


def captures_of(graph: Any) -> list[Any]:
    """Return a trace's captured tensors, in the order of its last inputs."""
    insides = [inside for _, inside in graph.captures]
    last = graph.inputs[len(graph.inputs) - len(insides) :]
    if any(a is not b for a, b in zip(last, insides, strict=True)):
        raise CannotSplit("captures what is known only when it is called")
    return [outside for outside, _ in graph.captures]


def captures_for_towers(
    graph: Any, config: TowerConfig, xla: bool = False
) -> list[list[Any]]:
    """Return K lists of the tensors that towers pass for a trace's captures."""
    read = {id(graph.inputs[index]) for index in compat.only_read(graph)}
    rows = []
    for outside, inside in graph.captures:
        owner = owner_of(outside)
        if owner is not None:
            if owner.values[0].handle is not outside:
                raise CannotShare(f"uses another tower's part of {owner.name}")
            rows.append([component.handle for component in owner.values])
        elif outside.dtype == tf.variant:
            raise CannotShare("uses a variant of an outer function")
        elif id(inside) not in read and is_variable(inside):
            raise CannotShare(
                f"writes what towers have in common: {inside.name}"
            )
        elif outside.dtype == tf.resource and xla and config.num_towers > 1:
            # XLA uses variables of one device only.
            why = "uses what towers have in common"
            raise CannotShare(f"{why}: {inside.name}")
        else:
            rows.append([outside] * config.num_towers)
    return [list(column) for column in zip(*rows, strict=True)] or [
        [] for _ in config.devices
    ]


def is_variable(inside: Any) -> bool:
    """Whether a captured tensor is a variable's handle, not a table's."""
    if inside.dtype != tf.resource:
        return False
    return bool(compat.get_resource_handle_data(inside).is_set)


def owner_of(handle: Any) -> Any:
    """Return the variable on towers that has a component with this handle."""
    container = getattr(handle, "_distributed_container", None)
    return None if container is None else container()


def check_update(call: UpdateCall) -> None:
    """Check that an update uses nothing of the step but its gradients."""
    # The update runs after all of the trace. An object that is not Keras's own
    # might read tensors of the step, or variables written after the update.
    parts = list(optimizers_in(call.optimizer))
    rates = [getattr(part, "_learning_rate", None) for part in parts]
    constraints = [getattr(v, "constraint", None) for v in call.variables]
    for part in (*parts, *rates, *constraints):
        if part is None or isinstance(part, (int, float)):
            continue
        if type(part).__module__.partition(".")[0] != "keras":
            name = type(part).__name__
            raise CannotSplit(
                f"updates weights by {name}, which is not Keras's"
            )


def is_of_metric(variable: Any) -> bool:
    """Whether a variable holds the state of a metric."""
    return isinstance(variable, variables_lib.TowerVariable) and (
        variable.merge in (variables_lib.SUM, variables_lib.WHOLE)
    )


def check_after_update(graph: Any, operations: Iterable[tf.Operation]) -> None:
    """Check that only variables of metrics are used after an update."""
    outer = {id(inside): outside for outside, inside in graph.captures}
    for operation in operations:
        for tensor in operation.inputs:
            if tensor.dtype != tf.resource:
                continue
            outside = outer.get(id(tensor))
            if not is_of_metric(owner_of(outside)) and not is_zero(outside):
                raise CannotSplit("uses variables after its update")
