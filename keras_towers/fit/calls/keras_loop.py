"""Connects Keras's own loop to a call: its iterator and its steps.

``keras_patches.py`` installs these functions. ``tower_call.py`` has the call.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable

import keras

from keras_towers.fit.components import KerasStrategy
from keras_towers.fit.context.thread_state import ThreadLocal
from keras_towers.foundation import compat
from keras_towers.foundation.errors import TowerError
from keras_towers.foundation.object_types import EpochIterator, Step, Structure
from keras_towers.foundation.tf_strategy import Strategy

iterators: ThreadLocal[Callable[..., EpochIterator]] = ThreadLocal()
"""Makes the iterators of the call that this thread runs."""


def is_of_keras(fn: Callable[..., object]) -> bool:
    """Whether Keras made a function from a step of a model."""
    module = getattr(fn, "__module__", "")
    is_made = module == compat.trainer_module.__name__
    return isinstance(fn, UserStep) or (is_made and not inspect.ismethod(fn))


def epoch_iterator(
    original: Callable[..., EpochIterator],
    *args: object,
    distribute_strategy: Strategy | None = None,
    **kwargs: object,
) -> EpochIterator:
    """Make Keras's iterator over the data of a call that towers run."""
    if not isinstance(distribute_strategy, KerasStrategy):
        kwargs["distribute_strategy"] = distribute_strategy
        return original(*args, **kwargs)
    make = iterators.get()
    if make is None:
        raise without_call()
    return make(*args, **kwargs)


def build_without_call(
    original: Callable[..., None],
    model: keras.Model,
    *args: object,
    **kwargs: object,
) -> None:
    """Replace ``_maybe_symbolic_build``, which calls shadow on their models."""
    if isinstance(model.distribute_strategy, KerasStrategy):
        raise without_call()
    original(model, *args, **kwargs)


def without_call() -> TowerError:
    """Return the error for a method that Keras calls outside of a call."""
    return TowerError(
        "a method of a model was called without keras_towers: your code stored "
        "it before it imported keras_towers. Call the model's own fit, "
        "evaluate, predict, train_on_batch, test_on_batch or predict_on_batch, "
        "or import keras_towers first."
    )


class UserStep:
    """A step function of the model, marked to run on all towers."""

    def __init__(self, step: Step):
        # Towers cannot merge gradients inside a user's own tf.function.
        self._step = compat.traced_by(step)

    def __call__(self, batch: Structure) -> Structure:
        return self._step(batch)
