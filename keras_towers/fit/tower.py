"""What a tower knows about itself while its part of a step runs."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from keras_towers import compat


@dataclasses.dataclass
class Tower:
    """One tower in the middle of a step of ``fit``, ``evaluate`` or ``predict``.

    Attributes:
        index: position of this tower, 0 to total - 1.
        total: number of towers.
        weight: what this tower's mean loss counts for in the mean over the
            global batch: its share of the examples, as a Python float where
            it is known while tracing, else a scalar tensor.
        live: False (or a scalar False tensor) where this tower was given no
            example of the batch and computes on a borrowed one, so that
            nothing it computes may count. None where that cannot happen.
        average: whether losses are means over the batch (the towers' gradients
            are averaged) or sums (they are summed).
        weighted_optimizers: ids of the optimizers that have already put
            ``weight`` into the loss.
    """

    index: int
    total: int
    weight: Any
    live: Any = None
    average: bool = True
    weighted_optimizers: set[int] = dataclasses.field(default_factory=set)


_local = threading.local()


def current() -> Tower | None:
    """The tower whose step this thread is running or tracing, or None."""
    return getattr(_local, "tower", None)


class TowerReplicaContext(compat.MirroredReplicaContext):
    """Tells the true number of towers to code that asks the replica context.

    Inside a step ``tf.distribute.get_strategy().num_replicas_in_sync`` is 1,
    because losses are not to be divided by it; a layer that averages over
    ``all_reduce`` asks the replica context and needs the real number.
    """

    @property
    def num_replicas_in_sync(self) -> int:
        return len(self.strategy.extended.worker_devices)


@contextlib.contextmanager
def activate(tower: Tower) -> Iterator[Tower]:
    """Make ``tower`` the current one of this thread."""
    context = tf.distribute.get_replica_context()
    if type(context) is compat.MirroredReplicaContext:
        context.__class__ = TowerReplicaContext
    before = current()
    _local.tower = tower
    try:
        yield tower
    finally:
        _local.tower = before
