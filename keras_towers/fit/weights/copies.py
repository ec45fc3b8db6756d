"""Where the variables of a model are while its strategy runs it."""

from __future__ import annotations

import contextlib
from typing import Any

import keras

from keras_towers import compat
from keras_towers.errors import TowerError
from keras_towers.fit.context.by_identity import ByIdentity
from keras_towers.fit.contract import TowerConfig
from keras_towers.fit.weights import tower_variables as variables_lib


class Copies:
    """Holds variables once, or with a copy on each tower.

    Args:
        config: the towers.
        mirrors: whether each tower has its own copy of the weights, as those
            with memories of their own need.
    """

    def __init__(self, config: TowerConfig, mirrors: bool):
        self._config = config
        self.mirrors: bool = mirrors and config.num_towers > 1
        self._mirrored: ByIdentity[keras.Variable, Any] = ByIdentity()
        # What variables of replicas were before a call held them once.
        self._of_replicas: ByIdentity[keras.Variable, Any] = ByIdentity()

    def hold_once(self, variable: keras.Variable) -> bool:
        """Hold a variable where it is; return whether it had copies."""
        value = variable._value
        if not isinstance(value, compat.DistributedVariable):
            return False
        if value.distribute_strategy is not self._config.strategy:
            raise TowerError(
                f"variable {variable.path!r} was created under another "
                "strategy. Build the model outside of any scope, or inside "
                "this one's."
            )
        known = variable in self._of_replicas
        self._of_replicas[variable] = value
        variable._value = variables_lib.unbind(value)
        return not known

    def give_to_replicas(self) -> None:
        """Have replicas find their copies of what is held once."""
        for variable, value in self._of_replicas.items():
            if variable._value is value.values[0]:
                variables_lib.bind(value)
                variable._value = value

    def place(self, variable: keras.Variable) -> bool:
        """Hold a weight as its strategy does; return whether it moved."""
        value = variable._value
        known = self._mirrored.get(variable)
        if known is not None and known is value:
            return False
        moved = self.hold_once(variable)
        if self.mirrors:
            value = variables_lib.mirrored(self._config, variable._value)
            self._mirrored[variable] = variable._value = value
            return True
        return moved

    def first_seen(self) -> contextlib.AbstractContextManager[None]:
        """Have variables be what the first tower has, inside a block."""
        return variables_lib.viewed(
            list(self._mirrored), lambda value: value.values[0]
        )

    def handles(self) -> dict[int, list[Any]]:
        """Return mirrored variables' K handles, by the ids of the first."""
        found = [v._value.values for v in self._mirrored]
        return {
            id(values[0].handle): [value.handle for value in values]
            for values in found
        }

    def restore(self, variable: keras.Variable) -> None:
        """Leave a variable on the first tower only."""
        value = variable._value
        if (
            isinstance(value, compat.DistributedVariable)
            and value.distribute_strategy is self._config.strategy
        ):
            variable._value = variables_lib.unbind(value)
        for known in (self._mirrored, self._of_replicas):
            if variable in known:
                del known[variable]

    def restore_all(self) -> None:
        """Leave every variable on the first tower only."""
        for variable in list(self._mirrored):
            self.restore(variable)
