"""What a tower knows about itself while its part of a step runs."""

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
    """One tower in the middle of a step of ``fit`` or its like.

    Attributes:
        index: position of this tower, 0 to total - 1.
        total: number of towers.
        device: the name of the device, without job and task.
        training: whether this is a step of ``fit`` or ``train_on_batch``.
        update: what becomes of the gradients that the step computes; None
            while an update is under way.
        share: this tower's part of the global batch's examples, as a Python
            float where it is known while tracing, else a scalar tensor. None
            where the tower has a batch of its own, as one device has.
        live: False (or a scalar False tensor) where this tower was given no
            example of the batch and computes on a borrowed one, so that
            nothing it computes may count. None where that cannot happen.
        average: whether losses are means over the batch (the towers' gradients
            are averaged) or sums (they are summed).
        written: ids of the variables that some tower has assigned.
        weighted_losses: how many losses each optimizer, by its id, has put
            ``loss_weight`` into, and not applied yet.
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
        """What this tower's loss counts for in the loss of the global batch."""
        if self.share is None:
            return 1.0
        if self.average:
            return self.share
        return 1.0 if self.live is None else tf.cast(self.live, tf.float32)

    def count_only_if_live(self, value: tf.Tensor) -> tf.Tensor:
        """Zero in place of what was computed on a borrowed example."""
        if self.live is None:
            return value
        return tf.where(self.live, value, tf.zeros_like(value))


_towers: Slot[Tower] = Slot()

# Whether a call of Keras that runs without towers trains; None: no such call.
# With a single tower Keras runs as if there were no strategy.
training_alone: Slot[bool] = Slot()


def current() -> Tower | None:
    """The tower whose step this thread is running or tracing, or None."""
    return _towers.get()


def with_a_share() -> Tower | None:
    """The current tower if it has a part of a global batch, else None."""
    tower = current()
    return None if tower is None or tower.share is None else tower


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

    def __init__(
        self, strategy: tf.distribute.Strategy, index: int, total: int
    ):
        super().__init__(strategy, index)
        self._total = total

    @property
    def num_replicas_in_sync(self) -> int:
        """The number of towers of all processes."""
        return self._total

    def all_reduce(self, reduce_op, value, options=None):
        """Reduce over the towers that were given examples."""
        tower = current()
        if tower is not None and tower.live is not None:
            value = tf.nest.map_structure(tower.count_only_if_live, value)
        return super().all_reduce(reduce_op, value, options)


@contextlib.contextmanager
def activate(tower: Tower) -> Iterator[Tower]:
    """Make ``tower`` the current one of this thread."""
    outer = tf.distribute.get_replica_context()
    inner: Any = contextlib.nullcontext()
    if isinstance(outer, compat.MirroredReplicaContext):
        inner = TowerReplicaContext(
            outer.strategy, outer.replica_id_in_sync_group, tower.total
        )
    with inner, _towers.filled(tower):
        yield tower
