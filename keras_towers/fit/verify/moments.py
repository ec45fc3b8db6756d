"""Statistics of BatchNormalization on one device, used again by towers.

They are constants there as well as on one device, which also keeps deep
networks from amplifying what towers round otherwise.
"""

from __future__ import annotations

import contextlib
import functools
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import keras
import tensorflow as tf

from keras_towers.fit.context import patches
from keras_towers.fit.context import tower as tower_lib

# Part of a standard deviation.
_SAME = 1e-3

_Mode = Literal["record", "repeat", "watch"]


class Moments:
    """The means and variances that layers compute from a batch.

    Args:
        layers: layers that normalize with them.

    Attributes:
        layers: these layers.
        differ: names of those whose statistics on a tower are not those of the
            whole batch.
    """

    def __init__(self, layers: Sequence[keras.layers.BatchNormalization]):
        self.layers = layers
        self.differ: list[str] = []
        self._mode: _Mode = "record"
        self._taken: dict[int, list[tuple[Any, Any]]] = defaultdict(list)
        self._next: Counter[tuple[int, int]] = Counter()

    @contextlib.contextmanager
    def installed(self, mode: _Mode) -> Iterator[None]:
        """Record, repeat or watch statistics inside a block.

        Args:
            mode: ``"record"`` those of a step on one device, ``"repeat"`` them
                in other runs, or ``"watch"`` which are different there.
        """
        self._mode = mode
        self._next.clear()
        if mode == "record":
            self._taken.clear()
        with contextlib.ExitStack() as stack:
            for layer in self.layers:
                ours = functools.partial(self._moments, layer)
                stack.enter_context(patches.shadowed(layer, {"_moments": ours}))
            yield

    def _moments(self, layer: Any, inputs: Any, mask: Any) -> Any:
        # The class may have been patched since.
        own = type(layer)._moments.__get__(layer)
        if not tf.executing_eagerly():
            return own(inputs, mask)
        taken = self._taken[id(layer)]
        if self._mode == "record":
            mean, variance = own(inputs, mask)
            taken.append((tf.stop_gradient(mean), tf.stop_gradient(variance)))
            return taken[-1]
        tower = tower_lib.current()
        key = (0 if tower is None else tower.index, id(layer))
        place, self._next[key] = self._next[key], self._next[key] + 1
        whole = taken[place] if place < len(taken) else None
        if self._mode == "repeat" and whole is not None:
            return whole
        mine = own(inputs, mask)
        if whole is None or not _same(layer, whole, mine):
            self.differ.append(layer.name)
        return mine


def _same(layer: Any, whole: Any, mine: Any) -> bool:
    """Whether two pairs of a mean and a variance are the same."""
    mean, variance = (tf.cast(value, tf.float32) for value in whole)
    other_mean, other_variance = (tf.cast(value, tf.float32) for value in mine)
    room = variance + layer.epsilon
    off = tf.maximum(
        tf.abs(mean - other_mean) / tf.sqrt(room),
        tf.abs(variance - other_variance) / room,
    )
    return bool(tf.reduce_all(off <= _SAME))
