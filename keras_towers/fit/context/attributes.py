"""Python state of a step: attributes, and draws from Python's generators.

Towers run a step by turns: one goes on when another has to wait for it. A
tensor that the step keeps in an attribute of its model (``self.fake = ...``)
has to be the tower's own when the tower goes on, and a Python number that the
step counts up has to be that of one device. Draws from Python's and NumPy's
random generators become constants of the trace, which have to be the same on
all towers.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import random
import sys
import types
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_towers import compat

_NUMBERS = (bool, int, float, complex, str, bytes, np.ndarray, np.generic)
_CONTAINERS = (list, dict, set, collections.deque)
# Keras's own attributes are not the step's, but for the losses of a call.
_OF_CALLS = frozenset(("_losses", "_loss_ids"))
_LIBRARIES = sys.stdlib_module_names | {"keras", "tensorflow", "numpy"}
_LIBRARIES -= {"__main__"}
_FUNCTIONS = (types.FunctionType, types.MethodType, types.ModuleType)
# What compile() and fit() set, perhaps in another thread.
_OF_TRAINING = frozenset(
    (
        "stop_training",
        "optimizer",
        "loss",
        "compiled",
        "jit_compile",
        "run_eagerly",
        "steps_per_execution",
        "train_function",
        "test_function",
        "predict_function",
    )
)
_LARGEST_ARRAY = 1_000_000
_DEPTH = 6


@dataclasses.dataclass(frozen=True)
class Taken:
    """Values that ``Attributes.take`` returned."""

    values: list[tuple[bool | None, dict[str, tuple[Any, Any]]]]
    # Restores what ``put`` has to of random generators.
    restore_draws: Callable[[], None]


@functools.cache
def _of_keras() -> frozenset[str]:
    """The attributes that every layer and model has."""
    with compat.single_device_mode():
        plain = (keras.layers.Layer(name="layer"), keras.Model(name="model"))
    names = {name for instance in plain for name in vars(instance)}
    return frozenset((names | _OF_TRAINING) - _OF_CALLS)


class Attributes:
    """The attributes that a step may set, of a model and of its parts."""

    # Those of a model, its layers, and of objects of the user's own classes
    # that can be reached from there.

    def __init__(self, model: keras.Model, draws: bool = False):
        self._draws = draws
        step = model.train_step
        owners = _reachable(
            [*model._flatten_layers(), getattr(step, "__self__", 0)]
        )
        # With the names of what is no data, so that it is looked at only once.
        self._owners = [
            (
                owner,
                {
                    n
                    for n, v in vars(owner).items()
                    if not _is_data(n, v)
                    or (_is_kerass(owner) and n not in _OF_CALLS)
                },
            )
            for owner in owners
        ]

    def take(self) -> Taken:
        """Return the present values, for ``put``."""
        values = [
            (
                getattr(owner, "built", None),
                {
                    name: copied(value)
                    for name, value in _data_of(owner, others)
                },
            )
            for owner, others in self._owners
        ]
        return Taken(values, python_draws() if self._draws else _nothing)

    def put(self, taken: Taken) -> None:
        """Restore values that ``take`` returned."""
        taken.restore_draws()
        for (owner, others), (built, values) in zip(
            self._owners, taken.values, strict=True
        ):
            if getattr(owner, "built", None) != built:
                # What a layer set when it was built stays.
                continue
            own = vars(owner)
            for name, _ in list(_data_of(owner, values.keys() | others)):
                del own[name]
            for name, (value, content) in values.items():
                if content is None and own.get(name) is value is not None:
                    continue
                if name not in own or _is_data(name, own[name]):
                    own[name] = restored(value, content)


def _nothing() -> None:
    pass


def python_draws() -> Callable[[], None]:
    """Return what restores the states of Python's and NumPy's generators."""
    python, numpy = random.getstate(), np.random.get_state()

    def restore() -> None:
        random.setstate(python)
        np.random.set_state(numpy)

    return restore


def _reachable(start: Iterable[Any]) -> Iterator[Any]:
    """Yield objects with attributes, each once."""
    seen: set[int] = set()
    waiting = [(value, 0) for value in start]
    while waiting:
        value, depth = waiting.pop()
        if id(value) in seen or depth > _DEPTH:
            continue
        seen.add(id(value))
        inside: Iterable[Any] = ()
        if isinstance(value, dict):
            inside = value.values()
        elif isinstance(value, (list, tuple)):
            inside = value
        elif isinstance(value, keras.layers.Layer) or _is_users(value):
            yield value
            inside = [v for n, v in vars(value).items() if n not in _of_keras()]
        waiting += [(item, depth + 1) for item in inside]


def _is_kerass(layer: Any) -> bool:
    """Whether a layer is one of Keras's own, which keep nothing of a step."""
    package = type(layer).__module__.partition(".")[0]
    return package == "keras" and not isinstance(layer, keras.Model)


def _is_users(value: Any) -> bool:
    package = type(value).__module__.partition(".")[0]
    return hasattr(value, "__dict__") and not (
        package in _LIBRARIES or isinstance(value, (type, *_FUNCTIONS))
    )


def _data_of(owner: Any, others: Collection[str]) -> Iterator[tuple[str, Any]]:
    """Yield an object's data by name, but for some names."""
    for name, value in vars(owner).items():
        if name not in others and _is_data(name, value):
            yield name, value


def _is_data(name: str, value: Any) -> bool:
    """Whether an attribute consists of tensors and numbers only."""
    return name not in _of_keras() and all(map(_is_plain, leaves(value)))


def _is_plain(leaf: Any) -> bool:
    if leaf is None or isinstance(leaf, _NUMBERS):
        return True
    variable = isinstance(leaf, (tf.Variable, keras.Variable))
    return tf.is_tensor(leaf) and not variable


def leaves(value: Any, depth: int = 0) -> Iterator[Any]:
    """Yield what containers hold, and containers that are in too many."""
    if isinstance(value, dict):
        inside: Iterable[Any] = value.values()
    elif isinstance(value, (*_CONTAINERS, tuple)):
        inside = value
    else:
        inside = ()
        yield value
    for item in inside:
        if depth < _DEPTH:
            yield from leaves(item, depth + 1)
        else:
            yield item


def attributes_of(owner: Any) -> dict[str, tuple[Any, Any]]:
    """Return all attributes of an object, for ``put_back``."""
    return {name: copied(value) for name, value in vars(owner).items()}


def put_back(owner: Any, values: dict[str, tuple[Any, Any]]) -> None:
    """Undo all changes of attributes, without the owner's ``__setattr__``."""
    own = vars(owner)
    for name in own.keys() - values.keys():
        del own[name]
    for name, (value, content) in values.items():
        own[name] = restored(value, content)


def copied(value: Any, depth: int = 0) -> tuple[Any, Any]:
    """Return a value with its content, which may be changed in place."""
    # What TensorFlow wraps has attributes besides items.
    if isinstance(value, np.ndarray):
        small = value.size <= _LARGEST_ARRAY
        return value, value.copy() if small else None
    inside = _unwrapped(value)
    if not isinstance(inside, _CONTAINERS) or depth > _DEPTH:
        return value, None
    items: Any
    if isinstance(inside, dict):
        items = {key: copied(item, depth + 1) for key, item in inside.items()}
    elif isinstance(inside, set):
        items = set(inside)
    else:
        items = [copied(item, depth + 1) for item in inside]
    wraps = inside is not value or hasattr(value, "_storage")
    return value, (items, attributes_of(value) if wraps else {})


def restored(value: Any, content: Any) -> Any:
    """Give a value the content that ``copied`` returned, in place."""
    if isinstance(value, np.ndarray):
        if content is not None and value.flags.writeable:
            value[...] = content
        return value
    if content is None or _is_same(copied(value)[1], content):
        # It may be iterated over just now.
        return value
    items, attributes = content
    inside = _unwrapped(value)
    # Of the base class: Checkpoints refuse containers that were changed, and
    # Keras tracks what is added.
    if isinstance(inside, dict):
        ordered = isinstance(inside, collections.OrderedDict)
        base: Any = collections.OrderedDict if ordered else dict
        base.clear(inside)
        base.update(
            inside, {key: restored(*item) for key, item in items.items()}
        )
    elif isinstance(inside, set):
        set.clear(inside)
        set.update(inside, items)
    elif isinstance(inside, list):
        list.__setitem__(
            inside, slice(None), [restored(*item) for item in items]
        )
    else:
        rest = [restored(*item) for item in items]
        inside.clear()
        inside.extend(rest)
    if attributes:
        put_back(value, attributes)
    return value


def _unwrapped(value: Any) -> Any:
    """Return the dictionary that TensorFlow wraps, or the value."""
    wrapped = getattr(value, "__wrapped__", None)
    return wrapped if isinstance(wrapped, dict) else value


def _is_same(one: Any, other: Any) -> bool:
    """Whether two contents are the same objects."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(
            _is_same(one[key], other[key]) for key in one
        )
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(one) == len(other) and all(map(_is_same, one, other))
    if isinstance(one, set):
        return {*map(id, one)} == {*map(id, other)}
    return one is other
