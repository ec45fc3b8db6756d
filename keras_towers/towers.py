"""What code that runs on towers can ask, and how to run code on them."""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from keras_towers import compat
from keras_towers import devices as devices_lib
from keras_towers.errors import TowerError
from keras_towers.fit.context import tower as tower_lib
from keras_towers.fit.contract import KerasStrategy
from keras_towers.fit.update import gradients


@dataclasses.dataclass(frozen=True)
class CurrentTower:
    """The tower that runs a piece of code.

    Attributes:
        index: its position among the towers of all processes, from 0.
        total: the number of towers of all processes.
        device: the name of its device, such as ``"/device:GPU:0"``.
        training: True in the steps of ``fit`` and ``train_on_batch``, False in
            those of ``evaluate`` and ``predict``. None where only the code
            itself knows: in a loop of one's own, and outside of any tower.
    """

    index: int
    total: int
    device: str
    training: bool | None

    @property
    def is_main(self) -> bool:
        """Whether it is tower 0, the one to print or to write something."""
        return self.index == 0


def current_tower() -> CurrentTower:
    """Say on which tower this code runs.

    For layers, losses and steps; also in ``Strategy.run`` of any strategy of
    TensorFlow. A step that is a ``tf.function`` is traced once for each tower,
    so that the answer may decide what is traced.

    Outside of any tower (plain Keras, a model that is being built, callbacks)
    the answer is the only tower that there is then, 0 of 1: code that asks runs
    as well on one device. TensorFlow runs a ``tf.py_function`` outside of the
    towers: ask before it.

    It ports tensorpack's ``get_current_tower_context``.

    Example:
        >>> class Noisy(keras.layers.Layer):
        ...     def call(self, x):
        ...         seed = (7, keras_towers.current_tower().index)
        ...         return x + tf.random.stateless_normal(tf.shape(x), seed)
    """
    tower = tower_lib.current()
    if tower is not None:
        return CurrentTower(
            tower.index, tower.total, tower.device, tower.training
        )
    context = tf.distribute.get_replica_context()
    if context is None or not tf.distribute.has_strategy():
        device = tower_lib.short_name(devices_lib.resolve(None)[0])
        return CurrentTower(0, 1, device, tower_lib.training_alone.get())
    strategy, local = context.strategy, compat.current_replica_id()
    ours = isinstance(strategy, KerasStrategy)
    first = strategy.config.first_tower if ours else 0
    return CurrentTower(
        first + local,
        context.num_replicas_in_sync,
        tower_lib.short_name(strategy.extended.worker_devices[local]),
        None,
    )


def run_on_each_tower(
    fn: Callable[..., Any], /, *args: Any, **kwargs: Any
) -> list[Any]:
    """Run a function on every tower of the strategy in force, for own loops.

    It works as it is and inside a ``tf.function``, under any strategy of
    TensorFlow that traces its replicas one by one; with no strategy it runs
    once. Towers have to do the same, so two things are compared:

    * the variables that ``fn`` creates. All towers create the same ones, or
      the first creates them and the others find them there, as with layers;
    * the variables that it returns gradients for, where it returns them as
      ``(gradient, variable)`` pairs, in lists, tuples, dictionaries or the
      ``zip`` object that made them.

    It ports tensorpack's ``TowerFunc`` and the checks of its
    ``TowerContext``.

    Args:
        fn: builds and runs one tower.
        *args: for ``fn``; a tower gets its own part of distributed values.
        **kwargs: for ``fn`` by name, likewise.

    Returns:
        What ``fn`` returned on each tower of this process, in their order, with
        a list in place of a ``zip`` object, which can be read only once.

    Raises:
        TowerError: towers created other variables than tower 0, or have no
            gradients for the same ones; the message names them. Or this was
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
        raise TowerError(
            f"run_on_each_tower takes a function, and was given {fn!r}."
        )
    in_replica = tf.distribute.get_replica_context() is not None
    if tower_lib.current() or (in_replica and tf.distribute.has_strategy()):
        raise TowerError(
            "run_on_each_tower was called on a tower: call it where the whole "
            "batch is, outside of Strategy.run and of a train_step."
        )
    calls = _Calls()

    def tower(*args, **kwargs):
        with calls.recorded():
            calls.end(fn(*args, **kwargs))

    tf.distribute.get_strategy().run(tower, args, kwargs)
    calls.check()
    return [calls.results[index] for index in sorted(calls.results)]


class _Asked(NamedTuple):
    """A variable that a tower wants; None is what is not known."""

    name: str
    shape: tuple | None
    dtype: str | None

    def described(self) -> str:
        shape = "?" if self.shape is None else list(self.shape)
        return f"{self.name!r} {shape} {self.dtype or '?'}"

    def same_name(self, other: _Asked) -> bool:
        # A name that is taken gets a number: it is not the tower's doing.
        mine, others = (
            re.sub(r"(_\d+)?(:0)?$", "", v.name) for v in (self, other)
        )
        return mine == others

    def same_value(self, other: _Asked) -> bool:
        return all(
            mine is None or others is None or mine == others
            for mine, others in zip(self[1:], other[1:], strict=True)
        )


class _Calls:
    """The calls of one function on all towers: what each made and returned."""

    def __init__(self):
        self.results: dict[int, Any] = {}
        self._created: dict[int, list[_Asked]] = {}
        self._missing: dict[int, list[_Asked]] = {}

    @contextlib.contextmanager
    def recorded(self) -> Iterator[None]:
        """Note, and compare, what this tower creates."""
        index = compat.current_replica_id()
        self._created[index] = []
        self._missing[index] = []
        with tf.variable_creator_scope(self._create):
            yield

    @tf.autograph.experimental.do_not_convert
    def end(self, result: Any) -> None:
        """Note what this tower's call returned."""
        self.results[compat.current_replica_id()] = _listed(result)

    def _create(self, next_creator: Callable, **kwargs: Any) -> Any:
        index = compat.current_replica_id()
        if index is None or index not in self._created:
            return next_creator(**kwargs)
        if index == 0:
            variable = next_creator(**kwargs)
            asked = _Asked(
                kwargs.get("name") or "Variable",
                _known(variable.shape),
                variable.dtype.name,
            )
            self._created[0].append(asked)
            return variable
        # Before TensorFlow hands tower 0's variable to this tower, whose shape
        # and dtype it does not look at.
        if not self._created[index]:
            self._missing[index] = list(self._created[0])
        asked = _asked(kwargs)
        self._created[index].append(asked)
        twin = next(filter(asked.same_name, self._missing[index]), None)
        if twin is None or not asked.same_value(twin):
            there = "no such variable" if twin is None else twin.described()
            raise _unlike(index, asked.described(), there)
        self._missing[index].remove(twin)
        return next_creator(**kwargs)

    @tf.autograph.experimental.do_not_convert
    def check(self) -> None:
        """Compare the towers once all have been called."""
        for index, missing in sorted(self._missing.items()):
            if missing:
                names = ", ".join(asked.described() for asked in missing)
                raise _unlike(index, "nothing", names)
        shares = []
        for _, result in sorted(self.results.items()):
            pairs = list(_pairs(result))
            shares.append(
                gradients.TowerGradients(
                    tuple(gradients.name_of(v) for _, v in pairs),
                    [gradient for gradient, _ in pairs],
                )
            )
        gradients.check_equal(shares)


def _unlike(index: int, here: str, there: str) -> TowerError:
    return TowerError(
        f"tower {index} creates other variables than tower 0: it creates "
        f"{here} where tower 0 creates {there}. Every tower has to create the "
        "same variables, of the same names, shapes and dtypes, or only tower 0 "
        "any."
    )


def _asked(kwargs: dict[str, Any]) -> _Asked:
    """What a call that creates a variable asks for."""
    shape, dtype = kwargs.get("shape"), kwargs.get("dtype")
    initial = kwargs.get("initial_value")
    if initial is not None:
        with contextlib.suppress(Exception):
            if callable(initial):
                # Traced only: values are drawn once, for tower 0.
                traced = tf.function(initial, autograph=False)
                initial = traced.get_concrete_function().structured_outputs
            else:
                initial = tf.convert_to_tensor(initial, dtype)
            shape = initial.shape if shape is None else shape
            dtype = initial.dtype if dtype is None else dtype
    return _Asked(
        kwargs.get("name") or "Variable",
        None if shape is None else _known(tf.TensorShape(shape)),
        None if dtype is None else tf.as_dtype(dtype).name,
    )


def _known(shape: tf.TensorShape) -> tuple | None:
    return tuple(shape) if shape.is_fully_defined() else None


def _listed(result: Any) -> Any:
    """What a tower returned, with lists in place of ``zip`` objects."""
    if isinstance(result, zip):
        return list(result)
    if type(result) is dict:
        return {key: _listed(value) for key, value in result.items()}
    if type(result) in (list, tuple):
        return type(result)(map(_listed, result))
    if isinstance(result, tuple) and hasattr(result, "_make"):
        return result._make(map(_listed, result))
    return result


def _pairs(result: Any) -> Iterator[tuple[Any, Any]]:
    """The ``(gradient, variable)`` pairs in what a tower returned."""
    if isinstance(result, Mapping):
        result = list(result.values())
    if not isinstance(result, (list, tuple)):
        return
    kinds = (tf.Variable, keras.Variable)
    if (
        len(result) == 2
        and isinstance(result[1], kinds)
        and not isinstance(result[0], kinds)
    ):
        yield result[0], result[1]
        return
    for item in result:
        yield from _pairs(item)
