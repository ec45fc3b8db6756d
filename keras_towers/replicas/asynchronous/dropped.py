"""The gradients that replicas have dropped, for logs and TensorBoard."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from keras_towers.replicas import ReplicaCounts


class Dropped:
    """Counts the gradients that were dropped in each epoch of a ``fit``.

    Args:
        replicas: number of replicas, T.
        aggregate: how many gradients an update averages, R.
        shared: whether any replica may take any token.
    """

    def __init__(self, replicas: int, aggregate: int, shared: bool):
        self._none = (0,) * replicas
        # Otherwise nothing can be dropped.
        self._told = shared or replicas > aggregate
        self.begin()

    def begin(self) -> None:
        """Begin with a ``fit``."""
        # At the end of the last epoch, and in it.
        self._before = self._epoch = self._none

    def logged(self, counts: ReplicaCounts) -> dict[str, Any]:
        """Return what the logs of an epoch that ends have besides others.

        Args:
            counts: what has become of the gradients of the ``fit`` so far.
        """
        if not self._told:
            return {}
        before, self._before = self._before, counts.dropped
        self._epoch = tuple(
            now - then for now, then in zip(self._before, before, strict=True)
        )
        return {"dropped_gradients": sum(self._epoch)}

    def write(self, epoch: int) -> None:
        """Write what was logged of an epoch to TensorBoard."""
        if not self._told:
            return
        for replica, dropped in enumerate(self._epoch):
            name = f"dropped_gradients/replica_{replica}"
            tf.summary.scalar(name, dropped, step=epoch)
