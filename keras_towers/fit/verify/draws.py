"""Random draws of one device, drawn again by towers.

To compare everything but the draws of a step, its towers get the rows of what
one device drew, whatever the layer or function that draws.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, Literal

import numpy as np
import tensorflow as tf

from keras_towers.fit.context import tower as tower_lib
from keras_towers.fit.verify import substitutes

_KINDS = "normal uniform truncated_normal gamma poisson categorical"
_DRAWING = [
    *((tf.random, name) for name in _KINDS.split()),
    *(
        (tf.random, f"stateless_{name}")
        for name in f"{_KINDS} binomial parameterized_truncated_normal".split()
    ),
    *(
        (tf.random.Generator, name)
        for name in ["normal", "uniform", "truncated_normal", "binomial"]
    ),
]
_DROPPING = [(tf.nn, "dropout"), (tf.nn.experimental, "stateless_dropout")]


class Draws:
    """The draws of a step on one device, for its towers.

    Args:
        rows: number of examples of the batch.
        towers: number of towers, K.

    Attributes:
        missed: whether draws were made that cannot be repeated on towers:
            while a graph is traced, or others than on one device.
        differ: whether towers drew something else than their rows of it.
    """

    def __init__(self, rows: int, towers: int):
        self._rows = rows
        counts = [rows // towers + (k < rows % towers) for k in range(towers)]
        self._starts = [sum(counts[:k]) for k in range(towers)]
        self._counts = counts
        self._drawn: list[tf.Tensor] = []
        self._next: Counter[int] = Counter()
        self._mode: Literal["record", "repeat", "watch"] = "record"
        self._stacked: dict[int, set[bytes]] = {}
        self.missed: bool = False
        self.differ: bool = False

    def for_towers(self, towers: int) -> Draws:
        """Return the same draws for another number of towers."""
        other = Draws(self._rows, towers)
        other._drawn, other._stacked = self._drawn, self._stacked
        return other

    @property
    def made(self) -> bool:
        """Whether the step on one device drew anything."""
        return bool(self._drawn) or self.missed

    @contextlib.contextmanager
    def recorded(self) -> Iterator[None]:
        """Record what a step on one device draws, inside a block."""
        self._drawn.clear()
        self._stacked.clear()
        with self._installed("record"):
            yield

    @contextlib.contextmanager
    def repeated(self) -> Iterator[None]:
        """Give the towers, or one device, what was recorded."""
        with self._installed("repeat"):
            yield

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Compare what the towers draw with what was recorded."""
        with self._installed("watch"):
            yield

    @contextlib.contextmanager
    def _installed(
        self, mode: Literal["record", "repeat", "watch"]
    ) -> Iterator[None]:
        self._mode = mode
        self._next.clear()
        with (
            substitutes.replaced(_DRAWING, self._draw),
            substitutes.replaced(_DROPPING, self._drop),
        ):
            yield

    def _draw(
        self,
        name: str,
        original: Callable[..., Any],
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        # Also where the result is not used: it may count draws.
        value = original(*args, **kwargs)
        if not tf.executing_eagerly():
            self.missed = True
            return value
        return self._settled(value)

    def _drop(
        self,
        name: str,
        original: Callable[..., Any],
        x: Any,
        rate: Any,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        x = tf.convert_to_tensor(x)
        kept = original(tf.ones_like(x), rate, *args, **kwargs)
        if not tf.executing_eagerly():
            self.missed = True
            return x * kept
        return x * self._settled(kept)

    def _settled(self, value: tf.Tensor) -> tf.Tensor:
        """Record a draw, or repeat or watch it."""
        if self._mode != "record":
            return self._again(value)
        value = tf.stop_gradient(value)
        if self._is_stacked(value.shape):
            # Which of the rows belong to a tower is unknown: make them equal.
            rows = {row.tobytes() for row in value.numpy()}
            self._stacked[len(self._drawn)] = rows
            value = tf.broadcast_to(value[:1], value.shape)
        self._drawn.append(value)
        return value

    def _is_stacked(self, shape: Any) -> bool:
        """Whether there are several rows for each example of the batch."""
        return len(shape) > 0 and (
            shape[0] > self._rows and shape[0] % self._rows == 0
        )

    def _again(self, value: tf.Tensor) -> tf.Tensor:
        """What one device drew instead of a value."""
        tower = tower_lib.current()
        index = 0 if tower is None else tower.index
        place, self._next[index] = self._next[index], self._next[index] + 1
        if place >= len(self._drawn):
            return self._lost(value)
        whole = self._drawn[place]
        alone = tower is None or tower.total == 1
        mine = whole if alone else self._part(whole, value.shape, index)
        if mine is None:
            return self._lost(value)
        if self._mode == "repeat":
            return mine
        if place in self._stacked:
            rows = {row.tobytes() for row in value.numpy()}
            self.differ |= not rows <= self._stacked[place]
        else:
            self.differ |= not np.array_equal(mine.numpy(), value.numpy())
        return value

    def _lost(self, value: tf.Tensor) -> tf.Tensor:
        """Keep a draw that has no counterpart on one device."""
        if self._mode == "repeat":
            self.missed = True
        else:
            self.differ = True
        return value

    def _part(
        self, whole: Any, shape: tf.TensorShape, index: int
    ) -> tf.Tensor | None:
        """The slice of a draw that has a shape; None if there is none."""
        if whole.shape.rank != shape.rank:
            return None
        begin = np.zeros(len(shape), np.int32)
        for axis, (there, here) in enumerate(
            zip(whole.shape, shape, strict=True)
        ):
            if there == here:
                continue
            times = there // self._rows
            if (there, here) != (
                times * self._rows,
                times * self._counts[index],
            ):
                return None
            begin[axis] = times * self._starts[index]
        return tf.slice(whole, begin, shape)
