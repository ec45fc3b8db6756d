"""The variables with a component on every tower.

Keras variables get one when their model is placed, or when a step first writes
them. A step may also count or average in a plain ``tf.Variable``, which nobody
can replace, because the user's code holds it; so on a tower, its handle is that
of the tower's component.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from keras_towers import compat
from keras_towers.errors import TowerError
from keras_towers.fit import told
from keras_towers.fit.context import patches
from keras_towers.fit.context import tower as tower_lib
from keras_towers.fit.context.by_identity import ByIdentity
from keras_towers.fit.contract import TowerConfig
from keras_towers.fit.weights import variables as variables_lib
from keras_towers.fit.weights.variables import (
    FIRST,
    MEAN,
    SUM,
    BatchShares,
    TowerVariable,
)
from keras_towers.reduction import sum_over_ranks

_WRITE = ("assign", "scatter", "batch_scatter", "_strided_slice_assign")
_METHODS = [
    name
    for name in vars(compat.BaseResourceVariable)
    if name.startswith(_WRITE)
]
# The code of TensorFlow that asks for a variable's handle in order to write it.
_WRITING = frozenset(
    inspect.unwrap(value).__code__
    for owner in (
        *(compat.BaseResourceVariable, compat.ResourceVariable),
        compat.state_ops,
    )
    for name, value in vars(owner).items()
    if name.startswith(_WRITE) and inspect.isfunction(value)
)


class SpreadVariables:
    """Spreads variables over the towers and gathers them again."""

    def __init__(self, config: TowerConfig):
        self._config = config
        # Ranks have to merge the same variables, so they forget none.
        self._spread: ByIdentity[keras.Variable, None] = ByIdentity(
            weak=config.transport.size == 1
        )
        self._late: list[keras.Variable | None] = []
        self._passing_on = False
        self.shares: BatchShares = BatchShares(config)
        self.native: ByIdentity[tf.Variable, TowerVariable] = ByIdentity(
            weak=False
        )

    def spread(self, variable: keras.Variable, merge: str) -> bool:
        """Give every tower a component of a variable."""
        value = variable._value
        if isinstance(value, TowerVariable):
            return False
        if isinstance(value, compat.DistributedVariable):
            if value.distribute_strategy is not self._config.strategy:
                raise TowerError(
                    f"variable {variable.path!r} was created under another "
                    "strategy. Build the model outside of any scope, or inside "
                    "this one's."
                )
            # TensorFlow's copies of a variable created in this scope are equal,
            # but streams and sums have to differ between towers.
            value = variables_lib.unbind(value)
        variable._value = variables_lib.spread(
            self._config, value, merge, self.shares
        )
        self._spread[variable] = None
        return True

    def spread_weight(self, variable: keras.Variable) -> bool:
        """Give every tower a component of a weight; see ``spread``."""
        merge = variables_lib.merge_of(variable.aggregation, variable._value)
        if variable.trainable and merge == SUM:
            # The optimizer's writes are the same on all towers.
            merge = MEAN
        new = self.spread(variable, merge)
        variable._value.sums_over_ranks = True
        return new

    def own(self, variable: keras.Variable, merge: str | None = None) -> None:
        """Spread a Keras variable that a step writes, unless it is spread."""
        # ``merge`` says how reads outside the towers merge it; None: as a
        # weight.
        if not isinstance(variable._value, compat.BaseResourceVariable):
            return
        tower_lib.note_first_write()
        with tf.init_scope():
            if merge is None:
                self.spread_weight(variable)
            else:
                self.spread(variable, merge)
        if variable._value.merge in (MEAN, FIRST):
            # The graph being traced may have changed the value before.
            variables_lib.copy_to_towers([variable])
        self._late.append(variable)

    def own_native(self, variable: tf.Variable) -> None:
        """Spread a ``tf.Variable`` that belongs to no Keras variable."""
        if variable in self.native or _is_component(variable):
            return
        tower_lib.note_first_write()
        merge = variables_lib.merge_of(
            variable.aggregation.name.lower(), variable
        )
        name = variable.name.split(":")[0]
        if merge == SUM:
            raise TowerError(
                f"the step writes tf.Variable {name!r} with aggregation=SUM, "
                "which towers cannot sum: make it a keras.Variable with "
                'aggregation="sum".'
            )
        merged = {MEAN: ", and at the end of an epoch their mean", FIRST: ""}
        told.differs(
            "plain-variable",
            variable,
            f"the step writes tf.Variable {name!r}, which is not a "
            "keras.Variable: every tower writes its own copy. Outside of a "
            f"step it has that of tower 0{merged[merge]}. Make it a "
            "keras.Variable, which also is saved with the model.",
        )
        with tf.init_scope():
            spread = variables_lib.spread(
                self._config, variable, merge, self.shares
            )
        spread.written_by_towers = True
        self.native[variable] = spread
        writing = dict.fromkeys(_METHODS, self._write)
        vars(variable).update(patches.bound(variable, writing))
        variables_lib.copy_to_towers([spread])
        self._late.append(None)

    def _write(
        self,
        variable: tf.Variable,
        original: Callable[..., Any],
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Write a variable; outside of the towers, all its components."""
        result = original(*args, **kwargs)
        if tower_lib.current() is None and not self._passing_on:
            self._passing_on = True
            try:
                self.native[variable].assign_everywhere(variable.read_value())
            finally:
                self._passing_on = False
        return result

    def component(self, variable: tf.Variable, index: int) -> tf.Variable:
        """Return a ``tf.Variable``'s component on a tower, or the variable."""
        if variable not in self.native:
            return variable
        return self.native[variable].values[index]

    def finish_step(self) -> bool:
        """Finish a step in which variables were spread, if any were."""
        late, self._late = self._late, []
        # Its optimizer did not know them.
        variables_lib.copy_to_towers(
            [v for v in late if v is not None and v.trainable]
        )
        return bool(late)

    def may_be_written(self) -> bool:
        """Whether steps may write means that differ between towers."""
        return any(
            v.written_by_towers or not v.trainable for v in self.averaged()
        )

    def begin_batch(self, parts: Any) -> Any:
        """Prepare for a batch; see ``BatchShares.begin_step``."""
        return self.shares.begin_step(parts, self.average_written)

    def average_written(self) -> None:
        """Merge the writes of towers, over all processes."""
        # Afterwards all towers have the same, and only one has what is summed.
        transport = self._config.transport
        weights = self.shares.weights()
        local = 1.0 if weights is None else tf.reduce_mean(weights)
        written = [v for v in self._values() if v.written_by_towers]
        means = [v for v in written if v.merge == MEAN]
        sums = [v for v in written if v.merge == SUM and v.sums_over_ranks]
        parts = [
            v.merged_value() * tf.cast(local / transport.size, v.dtype)
            for v in means
        ]
        parts += [v.merged_value() for v in sums]
        merged = sum_over_ranks(transport, parts)
        for variable, value in zip([*means, *sums], merged, strict=True):
            variable.assign_everywhere(value)
        self.shares.forget()

    def gather(self, variable: keras.Variable) -> None:
        """Reduce a variable to its first component, with the merged value."""
        value = variable._value
        if (
            isinstance(value, compat.DistributedVariable)
            and value.distribute_strategy is self._config.strategy
        ):
            variable._value = variables_lib.unbind(value)

    def gather_all(self) -> None:
        """Gather every variable that was spread."""
        for variable in self._spread:
            self.gather(variable)
        self._spread.clear()
        for native in self.native:
            for name in _METHODS:
                vars(native).pop(name, None)
            variables_lib.unbind(self.native[native])
        self.native.clear()
        self.shares.forget()

    def averaged(self) -> list[TowerVariable]:
        """Return the spread variables that merge by their mean."""
        return [v for v in self._values() if v.merge == MEAN]

    def _values(self) -> list[TowerVariable]:
        values = [variable._value for variable in self._spread]
        values += self.native.values()
        return [value for value in values if isinstance(value, TowerVariable)]


def _is_component(variable: tf.Variable) -> bool:
    for holder in (variable, variable._handle):
        container = getattr(holder, "_distributed_container", lambda: None)
        if container() is not None:
            return True
    return False


def handle(original: Callable[[Any], Any], variable: Any) -> Any:
    """Replace the handle of a ``tf.Variable`` by that of its component."""
    tower = tower_lib.current()
    if tower is None or tower.variables is None:
        return original(variable)
    # Two frames up: what asks for it.
    if sys._getframe(2).f_code in _WRITING:
        tower.variables.own_native(variable)
    return original(tower.variables.component(variable, tower.local_index))


def read(
    original: Callable[..., Any], variable: Any, *args: Any, **kwargs: Any
) -> Any:
    """Replace the method by which a ``tf.Variable`` is read."""
    mine = functools.partial(original, variable, *args, **kwargs)
    tower = tower_lib.current()
    if tower is None or tower.reads is None:
        return mine()
    return tower.reads(variable, mine)
