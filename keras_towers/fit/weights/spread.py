"""The Keras variables with a component on every tower."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from keras_towers import compat
from keras_towers.errors import TowerError
from keras_towers.fit.context import tower as tower_lib
from keras_towers.fit.context.by_identity import ByIdentity
from keras_towers.fit.contract import TowerConfig
from keras_towers.fit.weights import variables as variables_lib
from keras_towers.fit.weights.native import NativeVariables
from keras_towers.fit.weights.shares import BatchShares
from keras_towers.reduction import sum_over_ranks


class SpreadVariables:
    """Spreads Keras variables over the towers and gathers them again.

    Args:
        config: the towers.

    Attributes:
        shares: the towers' shares of the batch.
        native: ``tf.Variable``s that a step writes by itself.
    """

    def __init__(self, config: TowerConfig):
        self._config = config
        # Ranks have to merge the same variables, so they forget none.
        self._spread: ByIdentity[keras.Variable, None] = ByIdentity(
            weak=config.transport.size == 1
        )
        self._late: list[keras.Variable | None] = []
        self.shares: BatchShares = BatchShares(config)
        self.native: NativeVariables = NativeVariables(config, self.shares)

    def spread(self, variable: keras.Variable, merge: str) -> bool:
        """Give every tower a component of a variable.

        Args:
            variable: the variable.
            merge: how reads outside the towers merge it; see ``TowerVariable``.

        Returns:
            False if it was spread already.

        Raises:
            TowerError: it was created under another strategy.
        """
        value = variable._value
        if isinstance(value, variables_lib.TowerVariable):
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
        """Give every tower a component of a weight; see ``spread``.

        Its ``aggregation`` says how per-tower writes are merged. Without one
        their mean is taken, or for integers the value of tower 0.
        """
        merge = variables_lib.merge_of(variable.aggregation, variable._value)
        if variable.trainable and merge == variables_lib.SUM:
            # The optimizer's writes are the same on all towers.
            merge = variables_lib.MEAN
        new = self.spread(variable, merge)
        value = variable._value
        value.sums_over_ranks = True
        if new and not variable.trainable and merge != variables_lib.SUM:
            value.warns_of = variable.path
        return new

    def own(self, variable: keras.Variable, merge: str | None = None) -> None:
        """Spread a variable that a tower's step is about to write.

        The towers whose step comes later see the value from before.

        Args:
            variable: any Keras variable.
            merge: how reads outside the towers merge it; None: as a weight.
        """
        if not isinstance(variable._value, compat.BaseResourceVariable):
            return
        tower_lib.note_first_write()
        with tf.init_scope():
            if merge is None:
                self.spread_weight(variable)
            else:
                self.spread(variable, merge)
        if variable._value.merge in (variables_lib.MEAN, variables_lib.FIRST):
            # The graph being traced may have changed the value before.
            variables_lib.copy_to_towers([variable])
        self._late.append(variable)

    def own_native(self, variable: tf.Variable) -> None:
        """Do the same for a ``tf.Variable`` that is no Keras variable's."""
        if self.native.own(variable):
            self._late.append(None)

    def component(self, variable: tf.Variable, index: int) -> tf.Variable:
        """Return a ``tf.Variable``'s component on a tower of this process."""
        return self.native.component(variable, index)

    def finish_step(self) -> bool:
        """Finish a step in which variables were spread, if any were.

        Returns:
            Whether any were. The trace of such a step copies their values to
            the towers, which must happen once only.
        """
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
        """Merge what towers have written, over all processes.

        Afterwards all towers have the same, and only one has what is summed.
        """
        transport = self._config.transport
        weights = self.shares.weights()
        local = 1.0 if weights is None else tf.reduce_mean(weights)
        written = [v for v in self._values() if v.written_by_towers]
        means = [v for v in written if v.merge == variables_lib.MEAN]
        sums = [
            v
            for v in written
            if v.merge == variables_lib.SUM and v.sums_over_ranks
        ]
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
        self.native.release()
        self.shares.forget()

    def averaged(self) -> list[variables_lib.TowerVariable]:
        """Return the spread variables that merge by their mean."""
        return [v for v in self._values() if v.merge == variables_lib.MEAN]

    def _values(self) -> list[variables_lib.TowerVariable]:
        values = [variable._value for variable in self._spread]
        return [
            value
            for value in [*values, *self.native.values()]
            if isinstance(value, variables_lib.TowerVariable)
        ]
