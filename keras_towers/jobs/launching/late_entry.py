"""Enters a strategy's block when a script first needs it."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from keras_towers.fit.context import patches
from keras_towers.foundation import compat


@contextlib.contextmanager
def entered_late(
    make: Callable[[], contextlib.AbstractContextManager[object]],
) -> Iterator[None]:
    """Enter a strategy as late as a script cannot tell it from an early one.

    That is just before TensorFlow starts, which refuses some settings from then
    on, such as numbers of threads; when the script or Keras asks for the
    current strategy, as for the first layer; or at the end of the block.

    Args:
        make: makes the strategy; another thread than this one never calls it.
    """
    thread = threading.current_thread()
    is_entered = False
    with contextlib.ExitStack() as entered, contextlib.ExitStack() as waiting:

        def enter() -> None:
            nonlocal is_entered
            is_entered = True
            # Making the strategy starts TensorFlow, and asks for it, too.
            waiting.close()
            with tf.init_scope():
                entered.enter_context(make())

        def before(original: Callable[..., Any], *args: Any) -> Any:
            if threading.current_thread() is thread and not is_entered:
                enter()
            return original(*args)

        if compat.has_started():
            enter()
        else:
            hooks = (
                (compat.eager_context(), "ensure_initialized", before),
                (tf.distribute, "get_strategy", before),
                (tf.distribute, "has_strategy", before),
            )
            waiting.enter_context(patches.replaced(*hooks))
        yield
        if not is_entered:
            enter()
