"""Querying the current tower, and running code on each tower."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, cast

import keras
import tensorflow as tf

from keras_towers.fit.components import (
    KerasStrategy,
    NamedGradients,
    check_equal_gradients,
    name_of,
)
from keras_towers.fit.context import thread_state
from keras_towers.foundation import compat
from keras_towers.foundation.errors import TowerError
from keras_towers.foundation.object_types import Structure, Variable
from keras_towers.reduction.gradients import Gradient
from keras_towers.transport import devices as devices_lib


@dataclasses.dataclass(frozen=True)
class CurrentTower:
    """The tower on which code runs.

    Attributes:
        index: its index among the towers of all processes, from 0.
        total: the number of towers of all processes.
        device: the name of its device, such as ``"/device:GPU:0"``.
        training: True in the steps of ``fit`` and ``train_on_batch``, False in
            ``evaluate`` and ``predict``. None if unknown: in custom training
            loops and outside of any tower.
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

    Call this in layers, losses and steps, and in functions that
    ``Strategy.run`` of any TensorFlow strategy runs. If a step is a
    ``tf.function``, TensorFlow traces it once per tower, so you may branch on
    the result.

    Outside of any tower (in plain Keras, callbacks, or while a model is built),
    this returns tower 0 of 1, so the same code works on one device. TensorFlow
    runs a ``tf.py_function`` outside of the towers: call this before it.

    Ports tensorpack's ``get_current_tower_context``.

    Returns:
        The current tower.

    Example:
        >>> class Noisy(keras.layers.Layer):
        ...     def call(self, x):
        ...         seed = (7, keras_towers.current_tower().index)
        ...         return x + tf.random.stateless_normal(tf.shape(x), seed)
    """
    step = thread_state.current_step()
    if step is not None and step.device:
        return CurrentTower(step.index, step.total, step.device, step.training)
    if not compat.in_replica():
        device = devices_lib.short_name(devices_lib.devices_of(None)[0])
        trains = thread_state.trains_on_one_device.get()
        return CurrentTower(
            0, 1, device, trains if step is None else step.training
        )
    context: tf.distribute.ReplicaContext = tf.distribute.get_replica_context()
    strategy, local = context.strategy, compat.current_replica_id()
    ours = isinstance(strategy, KerasStrategy)
    config = strategy._config if ours else None
    first = config.num_towers * config.job.rank if config else 0
    return CurrentTower(
        first + local,
        context.num_replicas_in_sync,
        devices_lib.short_name(strategy.extended.worker_devices[local]),
        None,
    )


def run_on_each_tower(
    fn: Callable[..., object], /, *args: object, **kwargs: object
) -> list[Structure]:
    """Run a function on every tower of the current strategy.

    Use this in custom training loops. It works eagerly and inside a
    ``tf.function``, with any TensorFlow strategy that traces its replicas one
    by one. Without a strategy, the function runs once. All towers must run the
    same program, so this compares:

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
        **kwargs: keyword arguments of ``fn``, in the same way.

    Returns:
        The results of ``fn`` on the towers of this process, in order. ``zip``
        objects, which can be read only once, are replaced by lists.

    Raises:
        TowerError: the variables that a tower creates, or has gradients for,
            differ from tower 0's; the message names them. Or this was called on
            a tower.

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
    if compat.in_replica() or thread_state.current_step():
        raise TowerError(
            "run_on_each_tower was called on a tower: call it outside of "
            "Strategy.run and train_step, with the whole batch."
        )
    calls, fn = _TowerResults(), compat.convert_call(fn)

    tf.distribute.get_strategy().run(calls.run_on_tower, (fn, *args), kwargs)
    calls.compare_towers()
    return [calls.results[index] for index in sorted(calls.results)]


class _RequestedVariable(NamedTuple):
    """A variable that a tower requests; None means unknown."""

    name: str
    shape: tuple | None
    dtype: tf.DType | None

    def __str__(self) -> str:
        shape = "?" if self.shape is None else list(self.shape)
        return f"{self.name!r} {shape} {self.dtype.name if self.dtype else '?'}"


def _may_be_equal(one: _RequestedVariable, other: _RequestedVariable) -> bool:
    """Whether two variables agree in all that is known of both."""
    # TensorFlow appends a number to names that are in use.
    names = {re.sub(r"(_\d+)?(:0)?$", "", v.name) for v in (one, other)}
    return len(names) == 1 and all(
        a is None or b is None or a == b
        for a, b in zip(one[1:], other[1:], strict=True)
    )


class _TowerResults:
    """The calls of a function on all towers: created variables and results."""

    def __init__(self):
        self.results: dict[int, Structure] = {}
        self._created: dict[int, list[_RequestedVariable]] = {}

    def run_on_tower(
        self, fn: Callable[..., object], /, *args: object, **kwargs: object
    ) -> None:
        """Run the function on a tower, and compare what it creates."""
        index = compat.current_replica_id()
        self._created[index] = []
        with tf.variable_creator_scope(self._create):
            # A ``zip`` object can be read only once.
            self.results[index] = tf.nest.map_structure(
                lambda leaf: list(leaf) if isinstance(leaf, zip) else leaf,
                fn(*args, **kwargs),
            )

    def _create(self, next_creator: Callable, **kwargs: object) -> tf.Variable:
        index = compat.current_replica_id()
        if index in self._created:
            self._created[index].append(_requested(kwargs))
            # TensorFlow will return tower 0's variable to this tower, without
            # checking shape and dtype.
            self._check(index, len(self._created[index]) - 1)
        return next_creator(**kwargs)

    def _check(self, index: int, position: int) -> None:
        """Compare a tower's variable with tower 0's at the same position."""
        own, of_tower_0 = (
            next(iter(self._created[tower][position:]), None)
            for tower in (index, 0)
        )
        if not (own and of_tower_0 and _may_be_equal(own, of_tower_0)):
            raise TowerError(
                f"tower {index} creates other variables than tower 0: it "
                f"creates {own or 'nothing'} where tower 0 creates "
                f"{of_tower_0 or 'nothing'}. Either every tower must create "
                "the same variables, in the same order, with the same names, "
                "shapes and dtypes, or only tower 0 may create any."
            )

    def compare_towers(self) -> None:
        """Compare the towers after all calls."""
        for index, created in sorted(self._created.items()):
            if 0 < len(created) < len(self._created[0]):
                self._check(index, len(created))
        gradients = []
        for _, result in sorted(self.results.items()):
            pairs = _pairs(result)
            names = tuple(name_of(variable) for _, variable in pairs)
            gradients.append(NamedGradients(names, [grad for grad, _ in pairs]))
        check_equal_gradients(gradients)


def _requested(kwargs: Mapping[str, Any]) -> _RequestedVariable:
    """Return the variable that a creation call requests."""
    shape, dtype = kwargs.get("shape"), kwargs.get("dtype")
    value = kwargs.get("initial_value")
    with contextlib.suppress(Exception):
        initial: Any = value
        if callable(value):
            # Only traced: the values are drawn once, for tower 0.
            traced: Any = tf.function(value, autograph=False)
            initial = traced.get_concrete_function().structured_outputs
        elif value is not None:
            initial = tf.convert_to_tensor(value, dtype)
        shape = initial.shape if shape is None else shape
        dtype = initial.dtype if dtype is None else dtype
    known = tf.TensorShape(cast("Any", shape))
    return _RequestedVariable(
        kwargs.get("name") or "Variable",
        tuple(known) if known.is_fully_defined() else None,
        None if dtype is None else tf.as_dtype(dtype),
    )


def _pairs(result: object) -> list[tuple[Gradient | None, Variable]]:
    """Return the ``(gradient, variable)`` pairs in a tower's result."""
    kinds = (tf.Variable, keras.Variable)
    return [
        (gradient, variable)
        for gradient, variable in itertools.pairwise(tf.nest.flatten(result))
        if isinstance(variable, kinds) and not isinstance(gradient, kinds)
    ]
