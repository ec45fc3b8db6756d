"""Querying the current tower, and running code on each tower."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from keras_towers import compat
from keras_towers import devices as devices_lib
from keras_towers._tower_calls import TowerCalls
from keras_towers.errors import TowerError
from keras_towers.fit.context import tower as tower_lib
from keras_towers.fit.contract import KerasStrategy


@dataclasses.dataclass(frozen=True)
class CurrentTower:
    """The tower on which code runs.

    Attributes:
        index: its index among the towers of all processes, from 0.
        total: the number of towers of all processes.
        device: the name of its device, such as ``"/device:GPU:0"``.
        training: True in the steps of ``fit`` and ``train_on_batch``, False in
            those of ``evaluate`` and ``predict``. None if unknown: in custom
            training loops and outside of any tower.
    """

    index: int
    total: int
    device: str
    training: bool | None

    @property
    def is_main(self) -> bool:
        """Whether it is tower 0, the one that should print or write files."""
        return self.index == 0


def current_tower() -> CurrentTower:
    """Return the tower on which this code runs.

    For use in layers, losses and steps, and in ``Strategy.run`` of any
    TensorFlow strategy. A step that is a ``tf.function`` is traced once per
    tower, so the result may determine what is traced.

    Outside of any tower (plain Keras, building a model, callbacks) it returns
    tower 0 of 1, so that the code also works on one device. TensorFlow runs a
    ``tf.py_function`` outside of the towers: call this before it.

    Ports tensorpack's ``get_current_tower_context``.

    Returns:
        The current tower.

    Example:
        >>> class Noisy(keras.layers.Layer):
        ...     def call(self, x):
        ...         seed = (7, keras_towers.current_tower().index)
        ...         return x + tf.random.stateless_normal(tf.shape(x), seed)
    """
    tower = tower_lib.current()
    if tower is not None:
        tower.differs("asks which tower it runs on")
        return CurrentTower(
            tower.index, tower.total, tower.device, tower.training
        )
    context = tf.distribute.get_replica_context()
    if context is None or not tf.distribute.has_strategy():
        device = tower_lib.short_name(devices_lib.resolve(None)[0])
        return CurrentTower(0, 1, device, tower_lib.training_alone.get())
    strategy, local = context.strategy, compat.current_replica_id()
    ours = isinstance(strategy, KerasStrategy)
    first = strategy._components.config.first_tower if ours else 0
    return CurrentTower(
        first + local,
        context.num_replicas_in_sync,
        tower_lib.short_name(strategy.extended.worker_devices[local]),
        None,
    )


def run_on_each_tower(
    fn: Callable[..., Any], /, *args: Any, **kwargs: Any
) -> list[Any]:
    """Run a function on every tower of the current strategy.

    For custom training loops. It works eagerly and inside a ``tf.function``,
    under any TensorFlow strategy that traces its replicas one by one; without a
    strategy the function runs once. All towers have to do the same, so these
    are compared:

    * the variables that ``fn`` creates: all towers create the same ones, or
      only the first creates them and the others reuse them, as with layers;
    * the variables for which it returns gradients, if it returns
      ``(gradient, variable)`` pairs in lists, tuples, dictionaries or a ``zip``
      object.

    Ports tensorpack's ``TowerFunc`` and the checks of its ``TowerContext``.

    Args:
        fn: builds and runs one tower.
        *args: arguments of ``fn``; each tower gets its own component of
            distributed values.
        **kwargs: keyword arguments of ``fn``, likewise.

    Returns:
        The results of ``fn`` on the towers of this process, in order. ``zip``
        objects, which can be read only once, are replaced by lists.

    Raises:
        TowerError: a tower created other variables than tower 0, or has
            gradients for other variables; the message names them. Or this was
            called on a tower.

    Example:
        >>> def tower(x, y):
        ...     with tf.GradientTape() as tape:
        ...         loss = tf.reduce_mean((model(x) - y) ** 2)
        ...     weights = model.trainable_variables
        ...     grads = tape.gradient(loss, weights)
        ...     return loss, zip(grads, weights)
        >>> with keras_towers.TowerStrategy(2).scope():
        ...     model = make_model()
        ...     results = keras_towers.run_on_each_tower(tower, x, y)
        >>> losses = [loss for loss, _ in results]
    """
    if not callable(fn):
        raise TowerError(f"run_on_each_tower takes a function, but got {fn!r}.")
    in_replica = tf.distribute.get_replica_context() is not None
    if tower_lib.current() or (in_replica and tf.distribute.has_strategy()):
        raise TowerError(
            "run_on_each_tower was called on a tower: call it outside of "
            "Strategy.run and of train_step, with the whole batch."
        )
    calls = TowerCalls()

    def tower(*args, **kwargs):
        with calls.recorded():
            calls.end(fn(*args, **kwargs))

    tf.distribute.get_strategy().run(tower, args, kwargs)
    calls.check()
    return [calls.results[index] for index in sorted(calls.results)]
