"""TensorFlow variables that are no Keras variable's and that a step writes.

A step may count or average in a plain ``tf.Variable``. Nobody can replace it,
because the user's code holds it; so on a tower, TensorFlow's own methods of it
work on the tower's component.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from keras_towers import compat
from keras_towers.errors import TowerError
from keras_towers.fit import contract, told
from keras_towers.fit.context import tower as tower_lib
from keras_towers.fit.contract import TowerConfig
from keras_towers.fit.weights import variables as variables_lib
from keras_towers.fit.weights.shares import BatchShares

WRITES = tuple(
    (owner, name)
    for owner in (compat.BaseResourceVariable, compat.ResourceVariable)
    for name in vars(owner)
    if name.startswith(
        ("assign", "scatter", "batch_scatter", "_strided_slice_assign")
    )
)
"""The methods by which TensorFlow writes a variable, with their classes."""


class NativeVariables:
    """The ``tf.Variable``s that have a component on every tower.

    Args:
        config: the towers.
        shares: the towers' shares of the batch.
    """

    def __init__(self, config: TowerConfig, shares: BatchShares):
        self._config = config
        self._shares = shares
        self._passing_on = False
        # The variables are kept too: another could get the id of a dead one.
        self._owned: dict[
            int, tuple[tf.Variable, variables_lib.TowerVariable]
        ] = {}

    def own(self, variable: tf.Variable) -> bool:
        """Give every tower a component of a variable.

        Args:
            variable: what a step is about to write. Its ``aggregation`` says
                how the components are merged.

        Returns:
            False if the towers have components already.

        Raises:
            TowerError: they would have to be summed.
        """
        if id(variable) in self._owned or _is_component(variable):
            return False
        tower_lib.note_first_write()
        merge = variables_lib.merge_of(
            variable.aggregation.name.lower(), variable
        )
        name = variable.name.split(":")[0]
        if merge == variables_lib.SUM:
            raise TowerError(
                f"the step writes tf.Variable {name!r} with aggregation=SUM, "
                "which towers cannot sum: make it a keras.Variable with "
                'aggregation="sum".'
            )
        told.differs(
            "plain-variable",
            variable,
            f"the step writes tf.Variable {name!r}, which is not a "
            "keras.Variable: every tower writes its own copy. Outside of a "
            f"step it has that of tower 0{_MERGED[merge]}. Make it a "
            "keras.Variable, which also is saved with the model.",
        )
        with tf.init_scope():
            spread = variables_lib.spread(
                self._config, variable, merge, self._shares
            )
        spread.written_by_towers = True
        self._owned[id(variable)] = variable, spread
        variables_lib.copy_to_towers([spread])
        return True

    def component(self, variable: tf.Variable, index: int) -> tf.Variable:
        """Return the component of a variable on a tower; or the variable."""
        owned = self._owned.get(id(variable))
        return variable if owned is None else owned[1].values[index]

    def written_outside(self, variable: tf.Variable) -> None:
        """Pass on what was written outside of the towers."""
        owned = self._owned.get(id(variable))
        if owned is not None and not self._passing_on:
            self._passing_on = True
            try:
                owned[1].assign_everywhere(variable.read_value())
            finally:
                self._passing_on = False

    def values(self) -> list[variables_lib.TowerVariable]:
        """Return the variables with their components."""
        return [spread for _, spread in self._owned.values()]

    def release(self) -> None:
        """Make them ordinary variables again, with the merged values."""
        for _, spread in self._owned.values():
            variables_lib.unbind(spread)
        self._owned.clear()


_MERGED = {
    variables_lib.MEAN: ", and at the end of an epoch their mean",
    variables_lib.FIRST: "",
}


def _is_component(variable: tf.Variable) -> bool:
    for holder in (variable, variable._handle):
        container = getattr(holder, "_distributed_container", lambda: None)
        if container() is not None:
            return True
    return False


def handle(original: Callable[[Any], Any], variable: Any) -> Any:
    """Replace the handle of a ``tf.Variable``, by which it is used."""
    tower = tower_lib.current()
    if tower is None or tower.variables is None:
        return original(variable)
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


def write(
    original: Callable[..., Any], variable: Any, *args: Any, **kwargs: Any
) -> Any:
    """Replace a method that writes a ``tf.Variable``."""
    tower = tower_lib.current()
    if tower is not None:
        if tower.variables is not None:
            tower.variables.own_native(variable)
        return original(variable, *args, **kwargs)
    result = original(variable, *args, **kwargs)
    strategy = contract.in_force()
    if strategy is not None:
        strategy._components.adoption.wrote(variable)
    return result
