"""``keras.distribution`` on the TensorFlow backend.

Every call of ``fit``, ``evaluate``, ... under a ``DataParallel`` runs in the
scope of a strategy with its devices. The models stay on the towers between the
calls, so that nothing is placed or traced again, and are ordinary ones as soon
as another distribution, or None, is set.

Example:
    >>> import keras_towers
    >>> keras.distribution.set_distribution(keras.distribution.DataParallel())
    >>> model.fit(x, y)
"""

from __future__ import annotations

import contextlib
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import keras
import tensorflow as tf

from keras_towers.errors import TowerError
from keras_towers.fit.hooks import distribution as hooks
from keras_towers.strategies import distribution_job as jobs

if TYPE_CHECKING:
    from keras_towers.strategies.base import BaseStrategy

_connected: contextlib.ExitStack | None = None
_strategies: weakref.WeakKeyDictionary[Any, BaseStrategy] = (
    weakref.WeakKeyDictionary()
)


class _InThread(threading.local):
    """The state of a thread, for which Keras keeps a distribution, too.

    Attributes:
        strategy: the strategy of the thread's models.
        patched: keeps Keras patched as long as there is one.
        running: whether a call runs.
    """

    strategy: BaseStrategy | None = None
    patched: contextlib.ExitStack | None = None
    running = False


_here = _InThread()


def connect() -> None:
    """Connect ``keras.distribution`` to towers, after Keras's import."""
    global _connected
    if _connected is None:
        _connected = hooks.connect(_entered, _chosen, jobs.BACKEND)


def disconnect() -> None:
    """Undo ``connect``; models on towers become ordinary ones."""
    global _connected
    _follow(None)
    if _connected is not None:
        _connected.close()
    _connected = None


def is_connected() -> bool:
    """Whether ``keras.distribution`` trains on towers."""
    return _connected is not None


@contextlib.contextmanager
def _entered() -> Iterator[None]:
    """Run a call of a model's method as this thread's distribution says."""
    # A call inside a call, as of evaluate() in fit().
    if _here.running:
        yield
        return
    distribution = keras.distribution.distribution()
    strategy = None
    if distribution is not None:
        _check(distribution)
        _refuse_in_scope(distribution)
        strategy = _strategy_of(distribution)
    last = _here.strategy
    _follow(strategy)
    if strategy is None:
        # A model on towers enters their scope by itself, also where
        # clear_session() has dropped the distribution.
        inside = last is not None and tf.distribute.get_strategy() is last
        with hooks.one_device() if inside else contextlib.nullcontext():
            yield
        return
    _here.running = True
    try:
        with hooks.unsharded(distribution), strategy.scope():
            yield
    finally:
        _here.running = False


def _chosen(store: Callable[[], None], distribution: Any) -> None:
    """Store a distribution; the models of the last one leave its towers."""
    if distribution is not None:
        _check(distribution)
    if _here.running and distribution is not keras.distribution.distribution():
        raise TowerError(
            "the distribution was changed while a model trains: change it "
            "before or after the call of fit()."
        )
    store()
    found = None if distribution is None else _strategies.get(distribution)
    _follow(found)


def _follow(strategy: BaseStrategy | None) -> None:
    """Turn the models on another strategy than this into ordinary ones."""
    last = _here.strategy
    if last is strategy:
        return
    _here.strategy = None
    if last is not None:
        assert _here.patched is not None
        with _here.patched:
            # In an error, ranks do not wait for one another.
            last.__exit__(*sys.exc_info())
    if strategy is not None:
        from keras_towers.fit.hooks import keras as keras_hooks

        _here.patched = contextlib.ExitStack()
        _here.patched.enter_context(keras_hooks.installed())
        _here.strategy = strategy
        strategy._components.adoption.note_what_is_made()


def _check(distribution: Any) -> None:
    if not isinstance(distribution, keras.distribution.DataParallel):
        raise TowerError(
            f"{type(distribution).__name__} is not available on TensorFlow, "
            "where every device holds the whole model: use "
            "keras.distribution.DataParallel, or another backend of Keras."
        )


def _refuse_in_scope(distribution: Any) -> None:
    current = tf.distribute.get_strategy()
    # A model that is on its towers enters their scope by itself.
    if tf.distribute.has_strategy() and current is not _here.strategy:
        raise TowerError(
            f"a model is to train under {type(distribution).__name__} of "
            f"keras.distribution and, at the same time, in the scope of "
            f"{type(current).__name__}: leave that scope, or end the "
            "distribution with "
            "keras.distribution.set_distribution(None)."
        )


def _strategy_of(distribution: Any) -> BaseStrategy:
    """Return the strategy of a distribution: always the same one."""
    batches = jobs.batches_of(distribution)
    found = _strategies.get(distribution)
    if found is None or found.batches != batches:
        found = jobs.strategy_for(distribution, batches)
        _strategies[distribution] = found
    return found
