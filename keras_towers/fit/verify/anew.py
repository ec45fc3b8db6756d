"""Traces as if for the first time, which are not used."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from keras_towers import compat
from keras_towers.fit.verify import substitutes


def trace(step: Callable[[Any], Any], spec: Any) -> None:
    """Trace a step as Keras's ``fit`` does; no variable is lifted out of it.

    Args:
        step: takes a batch.
        spec: the spec of a batch.
    """

    @tf.autograph.experimental.do_not_convert
    def of_parts(*parts: tf.Tensor) -> Any:
        pack = tf.nest.pack_sequence_as
        return step(pack(spec, parts, expand_composites=True))

    parts = tf.nest.flatten(spec, expand_composites=True)
    compat.func_graph_from_py_func("step", of_parts, parts, {})


@contextlib.contextmanager
def traced() -> Iterator[None]:
    """Trace each ``tf.function`` that a step calls anew, inside a block.

    What it has been traced for before does not tell what is found out in a
    trace; and what is traced for no training must not be used in it.
    """
    fresh: dict[int, tuple[Any, Any]] = {}

    def call(
        name: str,
        original: Callable[..., Any],
        function: Any,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        if tf.executing_eagerly():
            return original(function, *args, **kwargs)
        if id(function) not in fresh:
            # The function is kept, too: another could get its id.
            fresh[id(function)] = function, compat.untraced(function)
        return original(fresh[id(function)][1], *args, **kwargs)

    with substitutes.replaced([(compat.Function, "__call__")], call):
        yield
