"""What ``tf.GradientTape``s return in a step, recorded or replaced."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from keras_towers.fit.context import tower as tower_lib
from keras_towers.fit.contract import NamedGradients
from keras_towers.fit.update.gradients import name_of
from keras_towers.fit.verify import substitutes
from keras_towers.reduction import scaled


class Tapes:
    """Records the gradients that a step takes from tapes.

    Args:
        instead: what the calls return instead, in their order; those of other
            variables, or beyond its end, keep their results.

    Attributes:
        calls: the calls of each tower, by its index.
    """

    def __init__(self, instead: Sequence[NamedGradients] = ()):
        self.calls: dict[int, list[NamedGradients]] = {}
        self._instead = instead

    @contextlib.contextmanager
    def recorded(self) -> Iterator[None]:
        """Record inside a block."""
        with substitutes.replaced(
            [(tf.GradientTape, "gradient")], self._gradient
        ):
            yield

    def _gradient(
        self,
        name: str,
        original: Callable[..., Any],
        tape: tf.GradientTape,
        target: Any,
        sources: Any,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        result = original(tape, target, sources, *args, **kwargs)
        variables = tf.nest.flatten(sources)
        if not tf.executing_eagerly() or not any(
            isinstance(v, (tf.Variable, keras.Variable)) for v in variables
        ):
            return result
        tower = tower_lib.current()
        calls = self.calls.setdefault(0 if tower is None else tower.index, [])
        names = tuple(name_of(v) for v in variables)
        weight = _weight(tower)
        grads = [
            None if grad is None else scaled(grad, weight)
            for grad in tf.nest.flatten(result)
        ]
        calls.append(NamedGradients(names, grads))
        if len(calls) <= len(self._instead):
            other = self._instead[len(calls) - 1]
            if other.names == names:
                return tf.nest.pack_sequence_as(sources, other.grads)
        return result

    def sums(self) -> list[NamedGradients]:
        """The calls of all towers, their gradients summed."""
        towers = list(self.calls.values())
        return [
            NamedGradients(
                same[0].names,
                [
                    _sum(grads)
                    for grads in zip(*(c.grads for c in same), strict=True)
                ],
            )
            for same in zip(*towers, strict=False)
            if len({call.names for call in same}) == 1
        ]


def _weight(tower: tower_lib.Tower | None) -> Any:
    """The weight of a tower's gradients in those of the global batch."""
    if tower is None or tower.share is None or tower.loss_is_weighted:
        return 1.0
    return tower.loss_weight


def _sum(grads: Sequence[Any]) -> Any:
    present = [tf.convert_to_tensor(g) for g in grads if g is not None]
    return tf.add_n(present) if present else None
