"""Tracing an optimizer's update rule once instead of for every weight.

Most of the time that a trace of many weights takes is spent in Python, in the
same lines of ``update_step``. Here they run for the first weight of a kind;
for the others, the operations that they have added are added again. What
depends on no weight, such as the corrected learning rate of Adam, is shared.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Sequence
from typing import Any

import keras
import tensorflow as tf

from keras_towers import compat
from keras_towers.fit.context import patches
from keras_towers.fit.update.recording import Recording
from keras_towers.fit.weights.slots import lists_by_weight

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
    own = vars(optimizer).keys() & {"update_step", "_apply_weight_decay"}
    return not own and _is_one_of(optimizer, _OF_ANY_SHAPE + _BY_SHAPE)


def _is_one_of(optimizer: Any, names: tuple[str, ...]) -> bool:
    # Not every version of Keras has all of them.
    classes = (getattr(keras.optimizers, name, None) for name in names)
    return type(optimizer) in classes


class Repeated:
    """Replaces methods of one optimizer during one call of ``apply``.

    Args:
        shared: ids of the ``tf.Variable``s whose buffers towers share.
    """

    def __init__(self, shared: Collection[int] = ()):
        self._shared = shared
        self._recordings: dict[Any, Recording] = {}

    def shadows(self) -> patches.Shadows:
        """Return the replacements."""
        return {
            "update_step": self._update_step,
            "_apply_weight_decay": self._apply_weight_decay,
        }

    def _update_step(
        self,
        optimizer: keras.optimizers.Optimizer,
        original: Callable[..., None],
        gradient: Any,
        variable: Any,
        learning_rate: Any,
    ) -> None:
        """Update a weight as another one of its kind was updated."""
        update = functools.partial(original, gradient, variable, learning_rate)
        if not _is_plain(variable) or not _has_rank(gradient):
            update()
            return
        slots = _slots(optimizer, variable)
        kind = [
            _signature(optimizer, each, variable.shape)
            for each in (gradient, variable, *slots)
        ]
        inputs = [gradient, variable.handle]
        inputs += [slot.handle for slot in slots if slot is not None]
        self._once_for(
            ("update", id(learning_rate), *kind), variable, inputs, update
        )

    def _apply_weight_decay(
        self,
        optimizer: keras.optimizers.Optimizer,
        original: Callable[..., None],
        variables: Sequence[Any],
    ) -> None:
        """Make a weight smaller as another one of its kind was."""
        cls = type(optimizer)
        if (
            cls._apply_weight_decay
            is not keras.optimizers.Adam._apply_weight_decay
        ):
            original(variables)
            return
        for variable in variables:
            decay = functools.partial(original, [variable])
            value = getattr(variable, "_value", variable)
            if not _is_plain(value) or not optimizer._use_weight_decay(value):
                decay()
                continue
            with tf.device(value.device):
                kind = "decay", _signature(optimizer, value, value.shape)
                self._once_for(kind, value, [value.handle], decay)

    def _once_for(
        self,
        kind: Any,
        variable: tf.Variable,
        inputs: Sequence[tf.Tensor],
        trace: Callable[[], None],
    ) -> None:
        """Trace something for a weight, unless it is known what comes of it.

        Args:
            kind: what must be equal for the operations to be.
            variable: the weight.
            inputs: what is another tensor for another weight.
            trace: does it for this one.
        """
        graph = compat.get_default_graph()
        kind = id(graph), id(variable) in self._shared, kind
        recording = self._recordings.get(kind)
        if tf.executing_eagerly():
            trace()
        elif recording is None:
            begin = len(graph.get_operations())
            trace()
            recording = Recording(graph, begin, inputs, variable.device)
            self._recordings[kind] = recording
        elif recording.repeats:
            recording.repeat(inputs)
        else:
            trace()


def _is_plain(variable: Any) -> bool:
    return (
        isinstance(variable, tf.Variable)
        and not isinstance(variable, compat.DistributedVariable)
        and variable.shape.rank is not None
    )


def _has_rank(gradient: Any) -> bool:
    return isinstance(gradient, tf.Tensor) and gradient.shape.rank is not None


def _slots(optimizer: Any, variable: Any) -> list[tf.Variable | None]:
    """The optimizer's own variables for a weight; None where it has none."""
    index = optimizer._get_variable_index(variable)
    row = [slots[index] for slots in lists_by_weight(optimizer)]
    return [None if slot is None else slot._value for slot in row]


def _signature(optimizer: Any, tensor: Any, shape: tf.TensorShape) -> Any:
    """What the operations of an update depend on."""
    if tensor is None:
        return None
    place = getattr(tensor, "device", None)
    if tensor.shape == shape and _is_one_of(optimizer, _OF_ANY_SHAPE):
        return tensor.dtype, place
    return tensor.dtype, place, tuple(tensor.shape)
