"""TensorFlow variables that are no Keras variable's and that a step writes.

A step may count or average in a plain ``tf.Variable``. Nobody can replace it,
because the user's code holds it; so on a tower, TensorFlow's own methods of it
work on the tower's component.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from keras_towers import compat
from keras_towers.errors import TowerError
from keras_towers.fit import told
from keras_towers.fit.context import patches
from keras_towers.fit.context import tower as tower_lib
from keras_towers.fit.contract import TowerConfig
from keras_towers.fit.weights import variables as variables_lib
from keras_towers.fit.weights.shares import BatchShares

_WRITE = ("assign", "scatter", "batch_scatter", "_strided_slice_assign")
_METHODS = [
    n for n in vars(compat.BaseResourceVariable) if n.startswith(_WRITE)
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
        patches.shadow(variable, dict.fromkeys(_METHODS, self._write))
        variables_lib.copy_to_towers([spread])
        return True

    def component(self, variable: tf.Variable, index: int) -> tf.Variable:
        """Return the component of a variable on a tower; or the variable."""
        owned = self._owned.get(id(variable))
        return variable if owned is None else owned[1].values[index]

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
                _, spread = self._owned[id(variable)]
                spread.assign_everywhere(variable.read_value())
            finally:
                self._passing_on = False
        return result

    def values(self) -> list[variables_lib.TowerVariable]:
        """Return the variables with their components."""
        return [spread for _, spread in self._owned.values()]

    def release(self) -> None:
        """Make them ordinary variables again, with the merged values."""
        for variable, spread in self._owned.values():
            patches.unshadow(variable, _METHODS)
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
