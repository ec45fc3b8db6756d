"""A tower that updates weights which other towers read and write meanwhile.

While its step is traced it is alone in the world, as on one device; what it
writes must not undo what others write at the same time. Adding to a weight is
one operation of TensorFlow, from which nothing is lost. Counting in Keras is
not: it reads, adds and writes. So it is made one operation here. Slots of an
optimizer may lose a write of another tower, as in Hogwild! (Recht et al.,
2011); not those of SGD, whose update is one operation (``fused``). Where an
update depends on the number of updates before it, or reads a weight that it
writes, one tower updates after the other.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from keras_towers import compat
from keras_towers.fit import fused
from keras_towers.fit import tower as tower_lib

_local = threading.local()
_numbers = itertools.count()


@dataclasses.dataclass
class SharedTower:
    """A tower whose step is traced or run in this thread.

    Attributes:
        index: position of this tower, 0 to total - 1.
        total: number of towers.
        device: the name of the device, without job and task.
        scale: what its gradients are multiplied by.
        turns: locks of optimizers, by their ids; those of all towers.
        written: ids of the variables that some tower has assigned.
        training: always True; others evaluate and predict.
        applies: whether an optimizer of this tower is in the middle of that.
    """

    index: int
    total: int
    device: str
    scale: float
    turns: dict[int, tf.CriticalSection]
    written: set[int]
    training: bool = True
    applies: bool = False


def current() -> SharedTower | None:
    """The tower that this thread runs, or None."""
    return getattr(_local, "tower", None)


@contextlib.contextmanager
def activate(tower: SharedTower) -> Iterator[None]:
    """Make ``tower`` the one that this thread runs."""
    before = current()
    _local.tower = tower
    try:
        yield
    finally:
        _local.tower = before


def apply(
    original: Callable,
    optimizer: Any,
    grads: Sequence[Any],
    trainable_variables: Sequence[Any] | None = None,
) -> None:
    """``Optimizer.apply`` of one tower, for itself.

    Args:
        original: the class's own ``apply``.
        optimizer: the optimizer it was called on.
        grads: this tower's gradients, None where there is none.
        trainable_variables: the variables they belong to.
    """
    tower = current()
    if tower.applies:
        # An optimizer inside another one, or the method of its base class.
        original(optimizer, grads, trainable_variables)
        return
    grads = [_scaled(grad, tower.scale) for grad in grads]
    if trainable_variables is not None:
        trainable_variables = list(trainable_variables)
    variables = trainable_variables or optimizer._trainable_variables
    tower.applies = True
    try:
        # Weights and slots do not travel to the tower; gradients come here.
        with tf.device(_home(variables)), fused.updates():
            if _takes_turns(optimizer, variables):
                _turns(tower, optimizer).execute(
                    lambda: _done(
                        original, optimizer, grads, trainable_variables
                    ),
                    exclusive_resource_access=False,
                )
            else:
                original(optimizer, grads, trainable_variables)
    finally:
        tower.applies = False


def assign_add(original: Callable, variable: Any, value: Any) -> Any:
    """``keras.Variable.assign_add`` from which no other tower's is lost."""
    return _in_one(original, variable, value, "assign_add")


def assign_sub(original: Callable, variable: Any, value: Any) -> Any:
    """``keras.Variable.assign_sub`` from which no other tower's is lost."""
    return _in_one(original, variable, value, "assign_sub")


def _in_one(original: Callable, variable: Any, value: Any, name: str) -> Any:
    native = variable._value
    plain = isinstance(native, tf.Variable) and not isinstance(
        native, compat.DistributedVariable
    )
    if (
        current() is None
        or not plain
        or not native.shape.is_fully_defined()
        or compat.in_stateless_scope()
    ):
        return original(variable, value)
    current().written.add(id(variable))
    value = tf.cast(tf.convert_to_tensor(value), native.dtype)
    if value.shape != native.shape:
        value = tf.broadcast_to(value, native.shape)
    return getattr(native, name)(value)


def assign(original: Callable, variable: Any, value: Any) -> Any:
    """``keras.Variable.assign``, of which the step takes note."""
    tower = current() or tower_lib.current()
    if tower is not None and not compat.in_stateless_scope():
        tower.written.add(id(variable))
    return original(variable, value)


def _scaled(grad: Any, scale: float) -> Any:
    if grad is None or scale == 1:
        return grad
    if isinstance(grad, tf.IndexedSlices):
        return tf.IndexedSlices(
            _scaled(grad.values, scale), grad.indices, grad.dense_shape
        )
    return grad * tf.cast(scale, grad.dtype)


def _home(variables: Sequence[Any]) -> str | None:
    for variable in variables:
        return getattr(variable, "_value", variable).device
    return None


def _takes_turns(optimizer: Any, variables: Sequence[Any]) -> bool:
    """Whether an update must not run in the middle of another one.

    It depends on the number of updates before it, or it reads a weight and
    writes it anew.
    """
    if tf.executing_eagerly() or not optimizer.built:
        # There are no threads; or the first trace makes slots, and is no more.
        return False
    return bool(
        optimizer.gradient_accumulation_steps
        or optimizer.use_ema
        or getattr(optimizer, "inner_optimizer", None) is not None
        or any(getattr(v, "constraint", None) for v in variables)
    )


def _done(function: Callable, *args: Any) -> tf.Tensor:
    """A tensor that is there when all that ``function`` writes is written."""
    graph = compat.get_default_graph()
    begun = len(graph.get_operations())
    function(*args)
    made = graph.get_operations()[begun:]
    with tf.control_dependencies([op for op in made if op.op_def.is_stateful]):
        return tf.constant(True)


def _turns(tower: SharedTower, optimizer: Any) -> tf.CriticalSection:
    if id(optimizer) not in tower.turns:
        with tf.init_scope(), tf.device("/device:CPU:0"):
            # By default TensorFlow names all of them alike, and then they are
            # one: a step with two optimizers would wait for itself.
            name = f"keras_towers/turns_{next(_numbers)}"
            tower.turns[id(optimizer)] = tf.CriticalSection(shared_name=name)
    return tower.turns[id(optimizer)]
