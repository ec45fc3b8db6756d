"""The call that a thread runs, and what Keras's own loop asks of it."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import keras

from keras_towers import compat
from keras_towers._strategy import Strategy
from keras_towers._types import EpochIterator, Step, Structure
from keras_towers.errors import TowerError
from keras_towers.fit.components import KerasStrategy
from keras_towers.fit.context.thread_state import ThreadLocal

if TYPE_CHECKING:
    from keras_towers.fit.calls.tower_call import TowerCall

_calls: ThreadLocal[TowerCall] = ThreadLocal()
iterators: ThreadLocal[Callable[..., EpochIterator]] = ThreadLocal()
"""Makes the iterators of the call that this thread runs."""
# Those of all ranks, in the one thread that makes such calls.
_joint: list[TowerCall] = []


def current() -> TowerCall | None:
    """Return the call that this thread is running, or None."""
    return _calls.get()


def around() -> TowerCall | None:
    """Return the call around what this thread is about to do, or None.

    A thread that runs no call may do something for the call that all ranks run
    in another thread, such as read its data.
    """
    return current() or (_joint[-1] if _joint else None)


def holding(call: TowerCall) -> contextlib.AbstractContextManager[None]:
    """Return a block in which this thread runs a call."""
    return _calls.holding(call)


@contextlib.contextmanager
def of_all_ranks(call: TowerCall) -> Iterator[None]:
    """Let a call be that of all ranks in this block."""
    _joint.append(call)
    try:
        yield
    finally:
        _joint.remove(call)


def outside() -> contextlib.AbstractContextManager[None]:
    """Return a block in which this thread runs no call."""
    return _calls.holding(None)


def step_of(fn: Callable[..., object]) -> Callable[..., Structure] | None:
    """Return what runs a function as a step of this thread's call.

    None: it is no step of Keras, and runs on each tower.

    Args:
        fn: what ``Strategy.run`` gets.

    Raises:
        TowerError: it is one, but of no call.
    """
    call, is_of_keras = current(), _is_of_keras(fn)
    if call is None:
        if is_of_keras:
            raise _without_call()
        return None
    if not is_of_keras and fn not in (
        call.model.train_step,
        call.model.test_step,
    ):
        return None
    # The user wrote the train function, and AutoGraph rewrites it.
    step = fn if isinstance(fn, UserStep) else compat.convert_call(fn)
    return functools.partial(call.run_step, step)


def _is_of_keras(fn: Callable[..., object]) -> bool:
    """Whether Keras makes a function, from a step of a model."""
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
        raise _without_call()
    return make(*args, **kwargs)


def build_without_call(
    original: Callable[..., None],
    model: keras.Model,
    *args: object,
    **kwargs: object,
) -> None:
    """Replace ``_maybe_symbolic_build``, which calls shadow on their models."""
    if isinstance(model.distribute_strategy, KerasStrategy):
        raise _without_call()
    original(model, *args, **kwargs)


def _without_call() -> TowerError:
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
