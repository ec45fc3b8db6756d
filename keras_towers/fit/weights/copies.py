"""The copies and parts of variables, for whoever reads and writes them."""

from __future__ import annotations

import collections
import itertools
import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import keras
import tensorflow as tf

from keras_towers.fit.weights.least_loaded import byte_size
from keras_towers.fit.weights.shards import ShardedVariable, VariablePart
from keras_towers.foundation import compat
from keras_towers.foundation.object_types import Variable
from keras_towers.transport import devices

if TYPE_CHECKING:
    from keras_towers.fit.components import ApplyCall


def native(variable: Variable) -> Any:
    """Return the ``tf.Variable`` of a Keras variable; others as they are."""
    return getattr(variable, "_value", variable)


def is_copied(variable: Variable) -> bool:
    """Whether a ``tf.Variable`` has a copy on each tower."""
    return isinstance(variable, compat.DistributedVariable)


def mark_copies(variable: Any) -> None:
    """Let copies, and their handles, lead to the variable that has them.

    A step captures the handle of a copy. TensorFlow marks only one of the two,
    depending on the class of the copy.
    """
    for copy in variable.values:
        container = weakref.ref(variable)
        copy._distributed_container = container
        copy.handle._distributed_container = container


def copy_on_tower(variable: Variable, tower: int = 0) -> tf.Variable:
    """Return a tower's copy of a ``tf.Variable``."""
    return variable.values[tower] if is_copied(variable) else variable


def copies_of(variable: Variable) -> list[tf.Variable]:
    """Return all copies of a variable of Keras or TensorFlow."""
    value = native(variable)
    return list(value.values) if is_copied(value) else [value]


def parts_of(variable: Variable) -> list[VariablePart]:
    """Return the parts of a variable in this process, each with its copies.

    Args:
        variable: a variable of Keras or TensorFlow. It is one part, but in
            shards.
    """
    value = native(variable)
    if isinstance(value, ShardedVariable):
        return value.parts
    shape = value.shape
    copies = copies_of(value)
    names = [copy.device for copy in copies]
    return [VariablePart([0] * shape.rank, [*shape], copies, names)]


def bytes_on(
    mesh: Sequence[Sequence[str]], variables: Iterable[keras.Variable]
) -> Mapping[str, int]:
    """Return the bytes of variables on each device, by its short name.

    Rows of a variable count where towers have them, even if towers share the
    memory of a host.

    Args:
        mesh: for each tower, the devices of its columns.
        variables: the variables, each once or several times.
    """
    every = map(devices.short_name, itertools.chain(*mesh))
    total = collections.Counter(dict.fromkeys(every, 0))
    for variable in {id(v): v for v in variables}.values():
        for part in parts_of(variable):
            for device, copy in zip(part.devices, part.copies, strict=True):
                # Copies in a graph that never runs may have no device.
                name = devices.short_name(device or mesh[0][0])
                total[name] += byte_size(copy)
    return total


def read_later(call: ApplyCall, graph: tf.Graph, begun: int) -> list[str]:
    """Return the names of the variables of a call that a step reads after it.

    Args:
        call: the call of an optimizer.
        graph: the graph of the step, which is traced to its end.
        begun: the number of operations before the call.
    """
    inside = {id(outer): id(own) for outer, own in graph.captures}
    used = {
        id(t) for each in graph.get_operations()[begun:] for t in each.inputs
    }
    return [
        path
        for path, variable in zip(call.names, call.variables, strict=True)
        if any(inside.get(id(c.handle)) in used for c in copies_of(variable))
    ]


def copy_to_towers(variables: Sequence[Variable], tower: int = 0) -> None:
    """Copy variables from one tower to the others."""
    for variable in variables:
        value = native(variable)
        if not is_copied(value):
            continue
        newest = copy_on_tower(value, tower)
        with tf.device(newest.device):
            fresh = newest.read_value()
        others = [copy for copy in value.values if copy is not newest]
        VariablePart([], [], others, []).assign(fresh)


def read_handle(handle: tf.Tensor) -> tf.Tensor:
    """Return the value of a variable, given its eager handle."""
    dtype = tf.as_dtype(compat.type_of_variable(handle))
    return tf.raw_ops.ReadVariableOp(resource=handle, dtype=dtype)


def copy_first(handles: Sequence[Any], devices: Sequence[str]) -> None:
    """Assign a variable's value on the first tower to all other towers.

    Args:
        handles: the handles of its copies on K towers.
        devices: the K towers' devices.
    """
    value = read_handle(handles[0])
    for handle, device in zip(handles[1:], devices[1:], strict=True):
        with tf.device(device):
            tf.raw_ops.AssignVariableOp(resource=handle, value=value)
