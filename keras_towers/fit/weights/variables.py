"""Variables with per-tower components, and per-tower views of a model."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeAlias

import keras
import tensorflow as tf

from keras_towers import compat
from keras_towers.devices import same_devices
from keras_towers.fit import told
from keras_towers.fit.context import tower as tower_lib
from keras_towers.fit.contract import TowerConfig
from keras_towers.fit.weights.shares import BatchShares

MEAN, SUM, FIRST, STREAM = "mean", "sum", "first", "stream"
_AGGREGATION = {
    MEAN: tf.VariableAggregation.MEAN,
    SUM: tf.VariableAggregation.SUM,
    FIRST: tf.VariableAggregation.ONLY_FIRST_REPLICA,
    STREAM: tf.VariableAggregation.ONLY_FIRST_REPLICA,
}

TowerOf: TypeAlias = int | Callable[[Any], int]
"""A tower; or what returns that of a variable with components on all."""

# Offset between the towers in the first word of a seed (the second one counts
# draws), large enough that their random streams do not overlap.
_SEED_STRIDE = 1_000_003


class TowerVariable(compat.SyncOnReadVariable):
    """A variable with one component on every tower.

    A tower reads and writes its own component, without communication. Outside
    the towers a write goes to all components, and a read returns one value,
    depending on ``merge``:

    * ``"sum"``: the sum (metric state, counted per tower);
    * ``"mean"``: the mean (moving statistics), weighted by the towers' shares
      of the batch; or the first component as long as no tower has written,
      because all are then equal;
    * ``"first"``: tower 0's value (integers);
    * ``"stream"``: tower 0's value (state of a seed generator); every other
      tower draws from its own random stream, unless random layers draw as one
      device.

    A tower without examples computes on a borrowed one. It changes its
    component nevertheless, because a step also writes what does not depend on
    the data (averages of weights, counters); a mean gives it no weight. Only a
    sum must not count the borrowed example.

    Component 0 is the original variable of the model, so that references to it
    and optimizers that look it up by its id stay valid.

    Args:
        config: the towers.
        values: one component for each tower of this process.
        merge: ``"sum"``, ``"mean"``, ``"first"`` or ``"stream"``.
        shares: the towers' shares of the batch; None: equal ones.

    Attributes:
        written_by_towers: whether a tower has written it.
        sums_over_ranks: whether a sum is also taken over the processes at the
            end of an epoch. Of metrics, logs take it whenever they need it.
        warns_of: its name, if a write that depends on a tower's examples is to
            be warned of, once.
    """

    def __init__(
        self,
        config: TowerConfig,
        values: Sequence[tf.Variable],
        merge: str,
        shares: BatchShares | None = None,
    ):
        super().__init__(config.strategy, values, _AGGREGATION[merge])
        self.merge = merge
        self._first_tower = config.first_tower
        self._has_no_sums = config.transport.rank > 0
        self._one_stream = merge == STREAM and config.random == "global"
        self._shares = shares
        self.written_by_towers = False
        self.sums_over_ranks = False
        self.warns_of: str | None = None
        self._elsewhere: tf.Tensor | None = None

    def merged_value(self) -> tf.Tensor:
        """Return the merged value of this process's components."""
        components = self._values
        with tf.device(components[0].device):
            if self.merge == SUM:
                return tf.add_n([v.read_value() for v in components])
            if self.merge == MEAN and self.written_by_towers:
                return self._mean([v.read_value() for v in components])
            first = components[0].read_value()
            return self._stream(first, back=True)

    def final_value(self) -> tf.Tensor:
        """Return the merged value, with what other processes have of a sum."""
        merged = self.merged_value()
        return merged if self._elsewhere is None else merged + self._elsewhere

    def _mean(self, values: list[tf.Tensor]) -> tf.Tensor:
        weights = None if self._shares is None else self._shares.weights()
        if weights is None:
            total = tf.add_n(values)
            return total / tf.cast(len(values), total.dtype)
        weights = tf.cast(weights, self.dtype)
        weights = weights / tf.reduce_sum(weights)
        total = tf.add_n(
            [v * w for v, w in zip(values, tf.unstack(weights), strict=True)]
        )
        # Of a process whose towers all have no examples nothing counts.
        return tf.where(tf.math.is_nan(weights[0]), values[0], total)

    def _stream(self, value: Any, index: int = 0, back: bool = False) -> Any:
        """Convert tower 0's random state to another tower's, or back."""
        index += self._first_tower
        if self.merge != STREAM or self._one_stream or index == 0:
            return value
        words = tf.cast(value, tf.int64)
        step = (-_SEED_STRIDE if back else _SEED_STRIDE) * index
        words += tf.constant([step] + [0] * (value.shape[0] - 1), tf.int64)
        return tf.cast(tf.bitwise.bitwise_and(words, 2**32 - 1), value.dtype)

    def assign_everywhere(self, value) -> None:
        """Write all components so that ``merged_value()`` is ``value``.

        A sum is stored on the first tower of all and zero on the others:
        dividing it over the towers would round integer counts.
        """
        primary, *others = self._values
        with tf.device(primary.device):
            value = tf.convert_to_tensor(value, primary.dtype)
            first = value
            if self.merge == SUM and self._has_no_sums:
                first = tf.zeros_like(value)
                if self.sums_over_ranks and tf.executing_eagerly():
                    self._elsewhere = value
            primary.assign(self._stream(first), read_value=False)
        for index, other in enumerate(others, 1):
            with tf.device(other.device):
                mine = self._stream(value, index)
                if self.merge == SUM:
                    mine = tf.zeros_like(value)
                other.assign(mine, read_value=False)

    def __deepcopy__(self, memo: dict[int, Any]) -> tf.Variable:
        # Copies are on no towers.
        primary = self._values[0]
        with compat.single_device_mode(), tf.device(primary.device):
            return tf.Variable(
                self.merged_value(),
                trainable=primary.trainable,
                name=primary.name.split(":")[0],
            )

    def _tower_index(self) -> int | None:
        if tf.distribute.get_strategy() is not self._distribute_strategy:
            return None
        return compat.current_replica_id()

    def _get(self):
        index = self._tower_index()
        return (
            self._get_cross_replica() if index is None else self._values[index]
        )

    def _get_cross_replica(self):
        return self._primary if compat.is_saving() else self.merged_value()

    def value(self):
        component = self._get()
        if isinstance(component, tf.Variable):
            return component.read_value()
        return component

    def read_value(self):
        return self.value()

    def __int__(self):
        return int(self.numpy())

    def __float__(self):
        return float(self.numpy())

    def _dense_var_to_tensor(self, dtype=None, name=None, as_ref=False):
        return tf.convert_to_tensor(self._get(), dtype=dtype, name=name)

    def assign(self, value, use_locking=False, name=None, read_value=True):
        index = self._tower_index()
        if index is None:
            self.assign_everywhere(value)
            return self
        # Never reset: a write may be traced once and run in every later step.
        self.written_by_towers = True
        mine = self._values[index]
        tower = tower_lib.current()
        self._warn_of_data(tower, value)
        if self.merge == SUM and tower is not None and tower.live is not None:
            value = tf.where(tower.live, tf.cast(value, mine.dtype), mine)
        return mine.assign(value, use_locking, name, read_value)

    def _warn_of_data(self, tower: tower_lib.Tower | None, value: Any) -> None:
        """Warn if a mean is to be taken of what may be no mean."""
        if self.warns_of is None or tower is None or tower.origins is None:
            return
        if tower.origins.depends_on_data(value):
            taken = (
                "mean over the towers"
                if self.merge == MEAN
                else "value of tower 0"
            )
            told.differs(
                "state",
                self.warns_of,
                f"the step writes {self.warns_of!r} from the batch. Every "
                "tower writes what it computes from its part, and the "
                f"{taken} is taken. That is right for means over examples "
                "only, which keras_towers.mean takes of the whole batch; for "
                "anything else, such as a queue, use keras_towers.gather.",
            )
            self.warns_of = None

    def assign_add(self, delta, use_locking=False, name=None, read_value=True):
        return self.assign(self + delta, use_locking, name, read_value)

    def assign_sub(self, delta, use_locking=False, name=None, read_value=True):
        return self.assign(self - delta, use_locking, name, read_value)


def spread(
    config: TowerConfig,
    primary: tf.Variable,
    merge: str,
    shares: BatchShares | None = None,
) -> TowerVariable:
    """Copy ``primary`` to the other towers and combine the copies.

    Args:
        config: the towers.
        primary: a plain variable, which becomes component 0.
        merge: how reads outside the towers merge the components.
        shares: the towers' shares of the batch; None: equal ones.

    Returns:
        The combined variable, whose merged value is that of ``primary``.
    """
    start = primary.read_value()
    components = [primary]
    for device in config.devices[1:]:
        with compat.single_device_mode(), tf.device(device):
            components.append(
                tf.Variable(
                    start,
                    dtype=primary.dtype,
                    shape=primary.shape,
                    trainable=primary.trainable,
                    # Optimizers may have rules for names.
                    name=primary.name.split(":")[0],
                )
            )
    variable = TowerVariable(config, components, merge, shares)
    if merge in (SUM, STREAM):
        variable.assign_everywhere(start)
    return variable


def merge_of(aggregation: str, value: Any) -> str:
    """Return how towers' writes to a variable are merged.

    Args:
        aggregation: Keras's name for it.
        value: the ``tf.Variable``.
    """
    without = MEAN if value.dtype.is_floating else FIRST
    return {
        "mean": MEAN,
        "sum": SUM,
        "only_first_replica": FIRST,
    }.get(aggregation, without)


def moved(variable: tf.Variable, device: str) -> tf.Variable:
    """Return a copy of a variable on a device, or itself if it is there.

    The copy keeps the id by which optimizers identify variables.
    """
    if same_devices([variable.device], [device]):
        return variable
    with compat.single_device_mode(), tf.device(device):
        copy: Any = tf.Variable(
            variable.read_value(),
            dtype=variable.dtype,
            shape=variable.shape,
            trainable=variable.trainable,
            name=variable.name.split(":")[0],
        )
    copy._unique_id = variable._unique_id
    return copy


def unbind(variable: Any) -> tf.Variable:
    """Return component 0 as a plain variable with the merged value."""
    primary = variable.values[0]
    if isinstance(variable, TowerVariable) and (
        variable.merge in (SUM, STREAM) or variable.written_by_towers
    ):
        primary.assign(variable.final_value())
    for holder in (primary, getattr(primary, "handle", None)):
        if holder is not None and hasattr(holder, "_distributed_container"):
            del holder._distributed_container
    return primary


@contextlib.contextmanager
def viewed(
    variables: Iterable[keras.Variable],
    resolve: Callable[[Any], Any],
) -> Iterator[None]:
    """Replace the values of distributed Keras variables inside a block.

    Args:
        variables: Keras variables; those on one device are left unchanged.
        resolve: maps a distributed variable to its replacement.
    """
    swapped = []
    try:
        for variable in variables:
            value = variable._value
            if isinstance(value, compat.DistributedVariable):
                seen = resolve(value)
                # Recorded first, so that a Ctrl-C in between is undone too.
                swapped.append((variable, value))
                variable._value = seen
        yield
    finally:
        for variable, value in swapped:
            variable._value = value


def component(variable: Any, index: TowerOf = 0) -> Any:
    """Return the component of a ``tf.Variable`` on one tower."""
    if isinstance(variable, compat.DistributedVariable):
        return variable.values[index(variable) if callable(index) else index]
    return variable


def copy_to_towers(variables: Sequence[Any], index: TowerOf = 0) -> None:
    """Copy one component of every variable to all other towers.

    Logical devices of one host share the buffer instead of copying it.

    Args:
        variables: variables of any kind.
        index: the tower that has the new values.
    """
    for variable in variables:
        value = getattr(variable, "_value", variable)
        if not isinstance(value, compat.DistributedVariable):
            continue
        newest = component(value, index)
        with tf.device(newest.device):
            fresh = newest.read_value()
        for other in value.values:
            if other is not newest:
                with tf.device(other.device):
                    other.assign(fresh, read_value=False)
