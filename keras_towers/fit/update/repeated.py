"""Tracing an optimizer's update rule once instead of for every weight.

Most of the time that a trace of many weights takes is spent in Python, in the
same lines of ``update_step``. Here they run for the first weight of a kind;
for the others, the operations that they have added are added again. What
depends on no weight, such as the corrected learning rate of Adam, is shared.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import keras
import tensorflow as tf

from keras_towers import compat
from keras_towers.fit.update.recording import Recording

# Those whose operations are the same for weights of every shape.
_OF_ANY_SHAPE = (
    "Adadelta",
    "Adagrad",
    "Adam",
    "Adamax",
    "AdamW",
    "Ftrl",
    "Lion",
    "Nadam",
    "RMSprop",
    "ScheduleFreeAdamW",
)
# Those whose operations depend on the shape, too.
_BY_SHAPE = ("Adafactor", "Lamb", "Muon")


def applies_to(optimizer: Any) -> bool:
    """Whether an optimizer's update rule is known to treat weights alike.

    Another one, such as a user's own, may ask for the name of a weight.
    """
    known = _is_one_of(optimizer, _OF_ANY_SHAPE + _BY_SHAPE)
    return known and "update_step" not in vars(optimizer)


def _is_one_of(optimizer: Any, names: tuple[str, ...]) -> bool:
    # Not every version of Keras has all of them.
    classes = (getattr(keras.optimizers, name, None) for name in names)
    return type(optimizer) in classes


class Repeated:
    """Replaces ``update_step`` of an optimizer during one call of ``apply``.

    Args:
        shared: ids of the ``tf.Variable``s whose buffers towers share.
    """

    def __init__(self, shared: Collection[int] = ()):
        self._shared = shared
        self._recordings: dict[Any, Recording | None] = {}

    def update_step(
        self,
        optimizer: keras.optimizers.Optimizer,
        original: Callable[..., None],
        gradient: Any,
        variable: Any,
        learning_rate: Any,
    ) -> None:
        """Update a weight as another one of its kind was updated.

        Args:
            optimizer: the optimizer it is called on.
            original: its own ``update_step``.
            gradient: the gradient of the weight.
            variable: the weight.
            learning_rate: a number or scalar tensor.
        """
        if tf.executing_eagerly() or not _is_plain(variable, gradient):
            original(gradient, variable, learning_rate)
            return
        graph = compat.get_default_graph()
        slots = _slots(optimizer, variable)
        inputs = [gradient, variable.handle]
        inputs += [slot.handle for slot in slots if slot is not None]
        kind = (
            id(graph),
            id(learning_rate),
            _signature(optimizer, gradient, variable.shape),
            *(
                _signature(optimizer, each, variable.shape)
                for each in (variable, *slots)
            ),
            id(variable) in self._shared,
        )
        recording = self._recordings.get(kind)
        if recording is None:
            begin = len(graph.get_operations())
            original(gradient, variable, learning_rate)
            self._recordings[kind] = Recording(
                graph, begin, inputs, variable.device
            )
        elif recording.repeats:
            recording.repeat(inputs)
        else:
            original(gradient, variable, learning_rate)


def _is_plain(variable: Any, gradient: Any) -> bool:
    return (
        isinstance(gradient, tf.Tensor)
        and isinstance(variable, tf.Variable)
        and not isinstance(variable, compat.DistributedVariable)
    )


def _slots(optimizer: Any, variable: Any) -> list[tf.Variable | None]:
    """The optimizer's own variables for a weight; None where it has none."""
    index = optimizer._get_variable_index(variable)
    number = len(optimizer._trainable_variables)
    others = ("_variables", "_trainable_variables")
    return [
        None if each[index] is None else each[index]._value
        for name, each in vars(optimizer).items()
        if name not in others and _is_by_weight(each, number)
    ]


def _is_by_weight(value: Any, number: int) -> bool:
    return (
        isinstance(value, list)
        and len(value) == number
        and all(e is None or isinstance(e, keras.Variable) for e in value)
    )


def _signature(optimizer: Any, tensor: Any, shape: tf.TensorShape) -> Any:
    """What the operations of an update depend on."""
    if tensor is None:
        return None
    place = getattr(tensor, "device", None)
    if tensor.shape == shape and _is_one_of(optimizer, _OF_ANY_SHAPE):
        return tensor.dtype, place
    return tensor.dtype, place, tuple(tensor.shape)
