"""Variables with per-tower components, and per-tower views of a model."""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeAlias

import keras
import tensorflow as tf

from keras_towers import compat
from keras_towers.devices import same_devices
from keras_towers.errors import TowerError
from keras_towers.fit.context import tower as tower_lib
from keras_towers.fit.contract import TowerConfig

MEAN, SUM, FIRST, STREAM = "mean", "sum", "first", "stream"
WHOLE = "whole"
_AGGREGATION = {
    MEAN: tf.VariableAggregation.MEAN,
    SUM: tf.VariableAggregation.SUM,
    FIRST: tf.VariableAggregation.ONLY_FIRST_REPLICA,
    STREAM: tf.VariableAggregation.ONLY_FIRST_REPLICA,
    WHOLE: tf.VariableAggregation.ONLY_FIRST_REPLICA,
}

TowerOf: TypeAlias = int | Callable[[Any], int]
"""A tower; or what returns that of a variable with components on all."""

# Offset between the towers in the first word of a seed (the second one counts
# draws), large enough that their random streams do not overlap.
_SEED_STRIDE = 1_000_003


class BatchShares:
    """The towers' shares of the last global batch."""

    # A tower's moving statistics and other averages describe its part of the
    # batch, so their mean over the towers is weighted by these shares. As long
    # as all batches are divided alike, such a mean may be taken once, at the
    # end; only where the shares change, the states have to be averaged before
    # the next step.

    def __init__(self, config: TowerConfig):
        self._config = config
        self._counts: tf.Variable | None = None

    @property
    def _last(self) -> tf.Variable:
        """Each tower's part of the last batch; 0 if all states are equal."""
        counts = self._counts
        if counts is None:
            parts = [0] * self._config.num_replicas
            counts = compat.hidden_variable("CPU:0", parts, tf.int64)
            self._counts = counts
        return counts

    def weights(self) -> tf.Tensor | None:
        """Return the K weights of this process's towers, of mean 1 over all."""
        if self._counts is None:
            return None
        counts = self._counts.read_value()
        if tf.executing_eagerly() and not _are_uneven(counts):
            return None
        weights = tf.cast(tf.where(_are_uneven(counts), counts, 1), tf.float32)
        weights /= tf.reduce_mean(weights)
        first = self._config.first_tower
        return weights[first : first + self._config.num_towers]

    def begin_step(self, parts: Any, average: Callable[[], None]) -> Any:
        """Average the towers' states if the shares are about to change."""
        last = self._last.read_value()
        parts = tf.cast(tf.stack(parts), tf.int64)

        def averaged() -> int:
            average()
            return 0

        changed = tf.reduce_any(parts != last) & (
            _are_uneven(parts) | _are_uneven(last)
        )
        if tf.executing_eagerly():
            return averaged() if changed else 0
        return tf.cond(
            changed,
            lambda: tf.py_function(averaged, [], tf.int32),
            lambda: tf.constant(0),
        )

    def end_step(self, parts: Any) -> None:
        """Record the parts of a batch that the towers got."""
        parts = tf.cast(tf.stack(parts), tf.int64)
        self._last.assign(parts, read_value=False)

    def forget(self) -> None:
        """Record that the towers' states are equal."""
        if self._counts is not None:
            self._counts.assign(tf.zeros_like(self._counts), read_value=False)


def _are_uneven(counts: tf.Tensor) -> tf.Tensor:
    return tf.reduce_any(counts != counts[0])


OUTSIDE = (
    "outside of the towers, in the block of their strategy. Let strategy.run "
    "run this step on the towers, put it into train_step of a model and call "
    "fit or train_on_batch, or leave the block, after which the model is on "
    "one device."
)


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
      device;
    * ``"whole"``: tower 0's value, which all others have, too (state of a
      metric that is computed from the global batch).

    A tower without examples computes on a borrowed one. The tower changes its
    component nevertheless, because a step also writes variables that do not
    depend on the data (averages of weights, counters); a mean gives such a
    component no weight. Only a sum must not count the borrowed example.

    Component 0 is the original variable of the model, so that references to it
    and optimizers that look it up by its id stay valid.
    """

    def __init__(
        self,
        config: TowerConfig,
        values: Sequence[tf.Variable],
        merge: str,
        shares: BatchShares | None = None,
    ):
        super().__init__(config.strategy, values, _AGGREGATION[merge])
        for component in values:
            # TensorFlow marks no handle of what a function has created.
            component.handle._distributed_container = weakref.ref(self)
        self.merge = merge
        self._first_tower = config.first_tower
        self._one_stream = merge == STREAM and config.random == "global"
        # None: equal shares of the batch.
        self._shares = shares
        self.written_by_towers = False
        self.sums_over_ranks = False
        # What was written outside of steps into a sum that rank 0 holds.
        self._elsewhere: tf.Variable | None = None
        if merge == SUM and config.transport.rank > 0:
            self._elsewhere = compat.hidden_variable(
                "CPU:0", tf.zeros_like(values[0]), values[0].dtype
            )

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

    def merge_as(self, merge: str) -> None:
        """Let a sum be whole on each tower from now on, or be one again."""
        value = self.merged_value()
        self.merge = merge
        self.assign_everywhere(value)

    def final_value(self) -> tf.Tensor:
        """Return the merged value, with what rank 0 holds of a sum."""
        merged = self.merged_value()
        if self.merge != SUM or self._elsewhere is None:
            return merged
        return merged + self._elsewhere

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
        """Write all components so that ``merged_value()`` is ``value``."""
        # A sum is stored on the first tower of all and zero on the others:
        # dividing it over the towers would round integer counts.
        primary, *others = self._values
        with tf.device(primary.device):
            value = tf.convert_to_tensor(value, primary.dtype)
            first = value
            if self.merge == SUM and self._elsewhere is not None:
                first = tf.zeros_like(value)
                self._elsewhere.assign(value, read_value=False)
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
        return _copy(primary, self.final_value(), primary.device)

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
        return self._primary if compat.is_saving() else self.final_value()

    @property
    def handle(self):
        """The handle of the tower's component, which gradients are taken by."""
        if compat.current_replica_id() is None and not compat.is_saving():
            name = self._primary.name.partition(":")[0]
            raise TowerError(f"a gradient of {name!r} is taken {OUTSIDE}")
        return super().handle

    def value(self):
        component = self._get()
        if isinstance(component, tf.Variable):
            return component.read_value()
        return component

    def read_value(self):
        return self.value()

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
        if self.merge == SUM and tower is not None and tower.live is not None:
            value = tf.where(tower.live, tf.cast(value, mine.dtype), mine)
        return mine.assign(value, use_locking, name, read_value)

    def assign_add(self, delta, use_locking=False, name=None, read_value=True):
        return self.assign(self + delta, use_locking, name, read_value)

    def assign_sub(self, delta, use_locking=False, name=None, read_value=True):
        return self.assign(self - delta, use_locking, name, read_value)

    def _scatter(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Write some rows of the component of a tower, or of all."""
        index, tower = self._tower_index(), tower_lib.current()
        if index is None:
            if self.merge in (SUM, STREAM):
                raise TowerError(
                    f"{name} of {self._primary.name!r} outside of the towers, "
                    "each of which holds a part of it: assign its whole value."
                )
            self.assign_everywhere(self.merged_value())
            for component in self._values:
                with tf.device(component.device):
                    getattr(component, name)(*args, **kwargs)
            return self
        self.written_by_towers = True
        mine = self._values[index]
        before = mine.read_value()
        getattr(mine, name)(*args, **kwargs)
        if self.merge == SUM and tower is not None and tower.live is not None:
            mine.assign(tf.where(tower.live, mine, before), read_value=False)
        return mine


# What TensorFlow's variables on several devices lack of those on one.
CONVERSIONS = ("__array__", "__complex__", "__float__", "__int__")
for _name in CONVERSIONS:
    setattr(TowerVariable, _name, getattr(compat.BaseResourceVariable, _name))

for _name in vars(compat.BaseResourceVariable):
    if _name.startswith(("scatter", "batch_scatter")):
        setattr(
            TowerVariable,
            _name,
            functools.partialmethod(TowerVariable._scatter, _name),
        )


def spread(
    config: TowerConfig,
    primary: tf.Variable,
    merge: str,
    shares: BatchShares | None = None,
) -> TowerVariable:
    """Copy ``primary`` to the other towers and combine the copies."""
    start = primary.read_value()
    others = [_copy(primary, start, device) for device in config.devices[1:]]
    variable = TowerVariable(config, [primary, *others], merge, shares)
    if merge in (SUM, STREAM):
        variable.assign_everywhere(start)
    return variable


def merge_of(aggregation: str, value: Any) -> str:
    """Return how towers' writes to a variable are merged."""
    without = MEAN if value.dtype.is_floating else FIRST
    return {
        "mean": MEAN,
        "sum": SUM,
        "only_first_replica": FIRST,
    }.get(aggregation, without)


def moved(variable: tf.Variable, device: str) -> tf.Variable:
    """Return a copy of a variable on a device, or itself if it is there."""
    if same_devices([variable.device], [device]):
        return variable
    copy = _copy(variable, variable.read_value(), device)
    copy._unique_id = variable._unique_id
    return copy


def _copy(variable: tf.Variable, value: tf.Tensor, device: str) -> Any:
    """Create a plain variable like another one."""
    with compat.single_device_mode(), tf.device(device):
        return tf.Variable(
            value,
            dtype=variable.dtype,
            shape=variable.shape,
            trainable=variable.trainable,
            # Optimizers may have rules for names.
            name=variable.name.split(":")[0],
        )


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
    """Replace the values of distributed Keras variables inside a block."""
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
    """Copy one component of every variable to all other towers."""
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
