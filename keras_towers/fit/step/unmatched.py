"""Warnings of random draws that no tower can match with one device's."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from keras_towers.fit import told
from keras_towers.fit.context import tower as tower_lib
from keras_towers.fit.context.rows import Rows


def unmatched(name: str) -> Callable[..., Any]:
    """Return the replacement of an operation that towers cannot match."""

    def draw(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if rows_of_draw() is not None:
            warn(
                name,
                f"{name} on a tower differs from one device: "
                + (
                    "a permutation of the global batch cannot be cut into "
                    "towers."
                    if "shuffle" in name
                    else "only stateless draws (keras.random, "
                    "tf.random.stateless_*) can be matched. Use these."
                ),
            )
        return original(*args, **kwargs)

    return draw


def stateful(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Replacement for the seeds of a stateful random operation."""
    # Two frames up: the function of TensorFlow that draws.
    name = sys._getframe(2).f_code.co_name
    return unmatched(f"TensorFlow's stateful {name}")(original, *args, **kwargs)


def of_generator(
    original: Callable[..., Any], generator: Any, *args: Any, **kwargs: Any
) -> Any:
    """Replacement for the key and counter of a ``tf.random.Generator``."""
    key, counter = unmatched("tf.random.Generator")(
        original, generator, *args, **kwargs
    )
    rows = rows_of_draw()
    if rows is not None:
        rows.foreign = counter
    return key, counter


def rows_of_draw() -> Rows | None:
    """The tower's rows, if its draws are to be those of one device."""
    tower = tower_lib.with_a_share()
    if tower is None:
        return None
    if tower.rows is None:
        tower.note_alone("random", "random layers")
    return tower.rows


def warn(name: str, message: str, once: str = "") -> None:
    """Warn of a draw that differs from one device."""
    told.differs("random", name, message, once or message)
