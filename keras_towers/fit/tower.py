"""What a tower knows about itself while its part of a step runs."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import threading
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from keras_towers import compat


@dataclasses.dataclass
class Tower:
    """One tower in the middle of a step of ``fit`` or its like.

    Attributes:
        index: position of this tower, 0 to total - 1.
        total: number of towers.
        share: this tower's part of the global batch's examples, as a Python
            float where it is known while tracing, else a scalar tensor.
        live: False (or a scalar False tensor) where this tower was given no
            example of the batch and computes on a borrowed one, so that
            nothing it computes may count. None where that cannot happen.
        average: whether losses are means over the batch (the towers' gradients
            are averaged) or sums (they are summed).
        device: the name of the device, without job and task.
        training: whether this is a step of ``fit`` or ``train_on_batch``.
        written: ids of the variables that some tower has assigned.
        weighted_losses: how many losses each optimizer, by its id, has put
            ``loss_weight`` into, and not applied yet.
        scales_loss: whether an optimizer is in the middle of that.
    """

    index: int
    total: int
    share: Any
    live: Any = None
    average: bool = True
    device: str = ""
    training: bool = False
    written: set[int] = dataclasses.field(default_factory=set)
    weighted_losses: collections.Counter[int] = dataclasses.field(
        default_factory=collections.Counter
    )
    scales_loss: bool = False

    @property
    def loss_weight(self) -> Any:
        """What this tower's loss counts for in the loss of the global batch."""
        if self.average:
            return self.share
        return 1.0 if self.live is None else tf.cast(self.live, tf.float32)

    def count_only_if_live(self, value: tf.Tensor) -> tf.Tensor:
        """Zero in place of what was computed on a borrowed example."""
        if self.live is None:
            return value
        return tf.where(self.live, value, tf.zeros_like(value))


_local = threading.local()


def current() -> Tower | None:
    """The tower whose step this thread is running or tracing, or None."""
    return getattr(_local, "tower", None)


def training_alone() -> bool | None:
    """Whether a call of Keras that runs without towers trains, None: no call.

    With a single tower Keras runs as if there were no strategy.
    """
    return getattr(_local, "training_alone", None)


@contextlib.contextmanager
def alone(training: bool, begins: bool = True) -> Iterator[None]:
    """Note whether a call of Keras that runs without towers trains.

    Args:
        training: whether it does.
        begins: False for a call that counts only inside another one.
    """
    before = training_alone()
    if begins or before is not None:
        _local.training_alone = training
    try:
        yield
    finally:
        _local.training_alone = before


def short_name(device: str) -> str:
    """The name of a device without job and task."""
    return device[device.index("/device") :] if "/device" in device else device


class TowerReplicaContext(compat.MirroredReplicaContext):
    """The replica context of a tower in the middle of a step.

    It tells the true number of towers: ``num_replicas_in_sync`` of the strategy
    is 1 inside a step, because losses are not to be divided by it, but a layer
    that averages over ``all_reduce`` needs the real number. And it lets a
    tower without examples add nothing to a sum.
    """

    @property
    def num_replicas_in_sync(self) -> int:
        return self.strategy.num_replicas

    def all_reduce(self, reduce_op, value, options=None):
        tower = current()
        if tower is not None and tower.live is not None:
            value = tf.nest.map_structure(tower.count_only_if_live, value)
        return super().all_reduce(reduce_op, value, options)


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
