"""The Keras variables with a component on every tower."""

from __future__ import annotations

import keras

from keras_towers import compat
from keras_towers.errors import TowerError
from keras_towers.fit.contract import TowerConfig
from keras_towers.fit.weights import variables as variables_lib


class SpreadVariables:
    """Spreads Keras variables over the towers and gathers them again.

    Args:
        config: the towers.
    """

    def __init__(self, config: TowerConfig):
        self._config = config
        self._spread: dict[int, keras.Variable] = {}

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
        variable._value = variables_lib.spread(self._config, value, merge)
        self._spread[id(variable)] = variable
        return True

    def spread_weight(self, variable: keras.Variable) -> bool:
        """Give every tower a component of a weight; see ``spread``.

        Per-tower writes are merged by their mean, or for integers by taking
        the value of tower 0.
        """
        floating = variable._value.dtype.is_floating
        return self.spread(
            variable, variables_lib.MEAN if floating else variables_lib.FIRST
        )

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
        for variable in self._spread.values():
            self.gather(variable)
        self._spread.clear()

    def averaged(self) -> list[variables_lib.TowerVariable]:
        """Return the spread variables that merge by their mean."""
        values = [variable._value for variable in self._spread.values()]
        return [
            value
            for value in values
            if isinstance(value, variables_lib.TowerVariable)
            and value.merge == variables_lib.MEAN
        ]
