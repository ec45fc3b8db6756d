"""The state of a tower during a step."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from keras_towers import compat
from keras_towers.fit.context.slots import Slot
from keras_towers.fit.contract import TakesGradients


@dataclasses.dataclass
class Tower:
    """One tower during a step of ``fit``, ``evaluate``, ...

    Attributes:
        index: index of this tower, 0 to total - 1.
        total: number of towers in all processes.
        device: name of the device, without job and task.
        training: whether this is a step of ``fit`` or ``train_on_batch``.
        update: applies the gradients of the step; None during an update.
        share: this tower's fraction of the examples of the global batch: a
            float if known during tracing, else a scalar tensor. None if the
            tower has its own batch, as on one device.
        live: False (or a scalar False tensor) if this tower has no examples and
            computes on a borrowed one, whose results must not count. None if
            that cannot happen.
        average: whether losses are means over the batch (gradients are
            averaged) or sums (gradients are summed).
        written: ids of the variables that any tower has assigned.
        weighted_losses: for each optimizer id, the number of losses scaled by
            ``loss_weight`` whose gradients are not applied yet.
    """

    index: int
    total: int
    device: str = ""
    training: bool = False
    update: TakesGradients | None = None
    share: Any = None
    live: Any = None
    average: bool = True
    written: set[int] = dataclasses.field(default_factory=set)
    weighted_losses: collections.Counter[int] = dataclasses.field(
        default_factory=collections.Counter
    )

    @property
    def loss_weight(self) -> Any:
        """The weight of this tower's loss in that of the global batch."""
        if self.share is None:
            return 1.0
        if self.average:
            return self.share
        return 1.0 if self.live is None else tf.cast(self.live, tf.float32)

    def count_only_if_live(self, value: tf.Tensor) -> tf.Tensor:
        """Return ``value``, or zeros if computed on a borrowed example."""
        if self.live is None:
            return value
        return tf.where(self.live, value, tf.zeros_like(value))


_towers: Slot[Tower] = Slot()

# Whether the Keras call that this thread runs without a strategy, as with a
# single tower, trains; None if there is no such call.
training_alone: Slot[bool] = Slot()


def current() -> Tower | None:
    """Return the tower whose step this thread runs or traces, or None."""
    return _towers.get()


def with_a_share() -> Tower | None:
    """Return the current tower if it has a share of a batch, else None."""
    tower = current()
    return None if tower is None or tower.share is None else tower


def short_name(device: str) -> str:
    """Return the name of a device without job and task."""
    return device[device.index("/device") :] if "/device" in device else device


class TowerReplicaContext(compat.MirroredReplicaContext):
    """The replica context of a tower during a step.

    It reports the real number of towers, which layers that average by
    ``all_reduce`` need: the strategy's ``num_replicas_in_sync`` is 1 during a
    step, so that losses are not divided by it. Towers without examples
    contribute zeros to an ``all_reduce``.
    """

    def __init__(
        self, strategy: tf.distribute.Strategy, index: int, total: int
    ):
        super().__init__(strategy, index)
        self._total = total

    @property
    def num_replicas_in_sync(self) -> int:
        """Number of towers in all processes."""
        return self._total

    def all_reduce(self, reduce_op, value, options=None):
        """Reduce over the towers that have examples."""
        tower = current()
        if tower is not None and tower.live is not None:
            value = tf.nest.map_structure(tower.count_only_if_live, value)
        return super().all_reduce(reduce_op, value, options)


@contextlib.contextmanager
def activate(tower: Tower) -> Iterator[Tower]:
    """Make ``tower`` the current one of this thread inside a block."""
    outer = tf.distribute.get_replica_context()
    inner: Any = contextlib.nullcontext()
    if isinstance(outer, compat.MirroredReplicaContext):
        inner = TowerReplicaContext(
            outer.strategy, outer.replica_id_in_sync_group, tower.total
        )
    with inner, _towers.filled(tower):
        yield tower
