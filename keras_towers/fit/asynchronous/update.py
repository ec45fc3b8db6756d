"""What a tower does with its gradients that waits for nobody.

While its step is traced it is alone in the world, as on one device; what it
writes must not undo what others write at the same time. Adding to a weight is
one operation of TensorFlow, from which nothing is lost. Counting in Keras is
not: it reads, adds and writes. So it is made one operation here. Slots of an
optimizer may lose a write of another tower, as in Hogwild! (Recht et al.,
2011); not those of SGD, whose update is one operation. Where an update depends
on the number of updates before it, or reads a weight that it writes, one tower
updates after the other.
"""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from keras_towers import compat
from keras_towers.fit.context import tower as tower_lib
from keras_towers.fit.context.patches import Shadows
from keras_towers.fit.update.one_device import home, updating
from keras_towers.fit.update.reduce import UpdateOnce
from keras_towers.fit.weights import variables as variables_lib
from keras_towers.reduction import scaled

_numbers = itertools.count()


class UpdateAlone(UpdateOnce):
    """Every tower applies its own gradients to weights that exist once.

    In a loop of one's own the towers run together, as ``UpdateOnce`` has it.

    Args:
        scale: what a tower's gradients are multiplied by.
        *together: for ``UpdateOnce``.
    """

    name = "alone"
    description = "every tower updates the shared weights by itself"

    def __init__(self, scale: float, *together: Any):
        super().__init__(*together)
        self.scale = scale
        self._turns: dict[int, tf.CriticalSection] = {}

    def place(self, variable: keras.Variable) -> bool:
        """Leave a weight where it is: there is one of each."""
        if isinstance(variable._value, compat.DistributedVariable):
            variable._value = variables_lib.unbind(variable._value)
        return False

    def release(self) -> None:
        """Give all optimizers' calls back."""
        super().release()
        self._turns.clear()

    def apply(
        self,
        optimizer: keras.optimizers.Optimizer,
        original: Callable[[list[Any], Any], Any],
        grads: Sequence[Any],
        trainable_variables: Sequence[Any] | None,
    ) -> None:
        """Update at once, whatever other towers do."""
        if tower_lib.current() is None:
            super().apply(optimizer, original, grads, trainable_variables)
            return
        grads = [None if g is None else scaled(g, self.scale) for g in grads]
        if trainable_variables is not None:
            trainable_variables = list(trainable_variables)
        variables = trainable_variables or optimizer._trainable_variables
        # Weights and slots do not travel to the tower; gradients come here.
        with tf.device(home(variables)), updating(optimizer):
            if _takes_turns(optimizer, variables):
                self._turn(optimizer).execute(
                    lambda: _done(original, grads, trainable_variables),
                    exclusive_resource_access=False,
                )
            else:
                original(grads, trainable_variables)

    def unscaled(self) -> UpdateAlone:
        """The same, for one tower that does not share its batch's steps."""
        other = copy.copy(self)
        other.scale = 1.0
        return other

    def _turn(self, optimizer: Any) -> tf.CriticalSection:
        """The lock of an optimizer, one for all towers."""
        if id(optimizer) not in self._turns:
            with tf.init_scope(), tf.device("/device:CPU:0"):
                # By default TensorFlow names all of them alike, and then they
                # are one: a step with two optimizers would wait for itself.
                name = f"keras_towers/turns_{next(_numbers)}"
                section = tf.CriticalSection(shared_name=name)
                self._turns[id(optimizer)] = section
        return self._turns[id(optimizer)]


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


def _done(function: Callable[..., Any], *args: Any) -> tf.Tensor:
    """A tensor that is there when all that ``function`` writes is written."""
    graph = compat.get_default_graph()
    begun = len(graph.get_operations())
    function(*args)
    made = graph.get_operations()[begun:]
    with tf.control_dependencies([op for op in made if op.op_def.is_stateful]):
        return tf.constant(True)


def _assign(variable: Any, original: Callable[..., Any], value: Any) -> Any:
    """``keras.Variable.assign``, of which the step takes note."""
    tower = tower_lib.current()
    if tower is not None and not compat.in_stateless_scope():
        tower.written.add(id(variable))
    return original(value)


def _add(
    name: str, variable: Any, original: Callable[..., Any], value: Any
) -> Any:
    """An addition from which no other tower's is lost."""
    tower, native = tower_lib.current(), variable._value
    if (
        tower is None
        or not isinstance(native, tf.Variable)
        or isinstance(native, compat.DistributedVariable)
        or not native.shape.is_fully_defined()
        or compat.in_stateless_scope()
    ):
        return original(value)
    tower.written.add(id(variable))
    value = tf.cast(tf.convert_to_tensor(value), native.dtype)
    if value.shape != native.shape:
        value = tf.broadcast_to(value, native.shape)
    return getattr(native, name)(value)


WRITES: Shadows = {
    "assign": _assign,
    "assign_add": functools.partial(_add, "assign_add"),
    "assign_sub": functools.partial(_add, "assign_sub"),
}
"""How a Keras variable is written that towers share."""
