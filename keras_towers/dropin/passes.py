"""Several backward passes per reduction and update."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from keras_towers.dropin import variable_key


class Passes:
    """Sums this rank's gradients and updates on every n-th call."""

    def __init__(self, number: int, average: bool):
        self._number = number
        self._average = average
        self._sums: dict[Any, tf.Variable] = {}
        self._count: Any = None

    def apply(
        self,
        grads: Sequence[Any],
        variables: Sequence[Any],
        update: Callable[[list[Any]], None],
    ) -> None:
        """Add N gradients or None, and call ``update`` with N sums if due."""
        sums: list[Any] = [
            None if grad is None else self._sum(grad, variable)
            for grad, variable in zip(grads, variables, strict=True)
        ]
        for total, grad in zip(sums, grads, strict=True):
            if isinstance(grad, tf.IndexedSlices):
                total.scatter_add(grad)
            elif grad is not None:
                total.assign_add(grad)
        count = self._count.assign_add(1)

        def step() -> tf.Tensor:
            divisor = self._number if self._average else 1
            update(
                [
                    None if total is None else total.read_value() / divisor
                    for total in sums
                ]
            )
            for total in sums:
                if total is not None:
                    total.assign(tf.zeros_like(total))
            self._count.assign(0)
            return tf.constant(True)

        tf.cond(count >= self._number, step, lambda: tf.constant(False))

    def restart(self) -> None:
        """Forget the sums that were begun."""
        for variable in (self._count, *self._sums.values()):
            if variable is not None:
                variable.assign(tf.zeros_like(variable))

    def _sum(self, grad: Any, variable: Any) -> tf.Variable:
        key = variable_key(variable)
        # These outlive the function being traced.
        with tf.init_scope():
            if self._count is None:
                self._count = tf.Variable(0, trainable=False)  # pyright: ignore[reportArgumentType]
            if key not in self._sums:
                self._sums[key] = tf.Variable(
                    tf.zeros(variable.shape, grad.dtype), trainable=False
                )
        return self._sums[key]
