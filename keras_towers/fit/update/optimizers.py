"""Optimizers on towers.

While a strategy is in force, the methods of every optimizer are looked up
here: ``apply`` passes gradients to the update of the strategy. The optimizer
keeps its class. The update itself runs on a single tower, as on one device.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import keras
import tensorflow as tf

from keras_towers import compat
from keras_towers._strategy import Strategy
from keras_towers.fit import contract
from keras_towers.fit.context import active_step, patches
from keras_towers.fit.context.blocks import Slot
from keras_towers.fit.contract import UpdateCall, name_of
from keras_towers.fit.update import update_rules
from keras_towers.fit.weights import tower_variables as variables_lib
from keras_towers.fit.weights.model_state import optimizers_in
from keras_towers.fit.weights.tower_variables import TowerOf, component

if TYPE_CHECKING:
    from keras_towers.fit.update.sharded import Shares

_updating: Slot[bool] = Slot()


def use_default_strategy(optimizer: Any) -> None:
    """Set an optimizer's strategy to TensorFlow's default one."""
    with compat.single_device_mode():
        default = tf.distribute.get_strategy()
    for part in optimizers_in(optimizer):
        part._distribution_strategy = default


def apply(
    optimizer: Any,
    original: Callable[..., None],
    grads: Sequence[Any],
    trainable_variables: Sequence[Any] | None = None,
) -> None:
    """Replace ``apply``: gradients of towers are reduced first."""
    take = _current_update_handler()
    if take is None:
        original(grads, trainable_variables)
        return

    def update(grads: Sequence[Any], variables: Sequence[Any]) -> None:
        with _updating.filled(True):
            original(grads, variables)

    given = trainable_variables
    variables = list(optimizer._trainable_variables if given is None else given)
    names = tuple(map(name_of, variables))
    call = UpdateCall(names, list(grads), optimizer, update, variables)
    if active_step.current() and all(
        gradient is None for gradient in call.grads
    ):
        # Keras raises an error of its own.
        original(grads, trainable_variables)
    else:
        take(call)


def _current_update_handler() -> Callable[[UpdateCall], None] | None:
    """Return the handler of optimizer calls here; None: Keras's own."""
    step, strategy = active_step.current(), contract.in_force()
    if step is not None:
        return step.apply if step.takes_updates else None
    if strategy is None:
        return None
    update = strategy._components.update
    # A replica's gradients are summed; outside of all there is nothing to sum.
    across = tf.distribute.in_cross_replica_context()
    return update.update_outside if across else update.apply


def _build(
    optimizer: Any, original: Callable[..., None], variables: Sequence[Any]
) -> None:
    strategy = contract.in_force()
    across = tf.distribute.in_cross_replica_context()
    if strategy is None or not across or optimizer.built:
        original(variables)
        return
    strategy._components.update.make_ready(optimizer, list(variables))


def _finalize_variable_values(
    optimizer: Any, original: Callable[..., None], variables: Sequence[Any]
) -> None:
    if contract.in_force() is None:
        original(variables)
        return
    with as_one_device(optimizer, variables):
        original(variables)
    variables_lib.copy_to_towers(variables)


_METHODS: patches.Shadows = {
    "apply": apply,
    "build": _build,
    "finalize_variable_values": _finalize_variable_values,
}


def attribute_of_optimizer(
    original: Callable[[Any, str], Any], optimizer: Any, name: str
) -> Any:
    """Replace the attribute look-up of optimizers.

    A step may use an optimizer that nobody has taken, since it is not an
    attribute of the model. During an update an optimizer may call the methods
    of one that it wraps.
    """
    value = original(optimizer, name)
    if name not in _METHODS or _updating.get():
        return value
    if name != "apply" and isinstance(value, patches.Bound):
        return value
    return functools.partial(_METHODS[name], optimizer, value)


class _AtTheVariable:
    """The strategy interface that optimizers use; updates run in place.

    TensorFlow's default strategy leaves the device of an update open; here it
    runs on the device of the variable.
    """

    def __init__(self, default: Strategy, only: Shares | None):
        self._default = default
        self._only = only
        self.extended = self

    def colocate_vars_with(self, variable: Any) -> Any:
        if self._only is not None:
            return tf.device(self._only.slot_device(variable))
        return self._default.extended.colocate_vars_with(variable)

    def update(
        self,
        variable: Any,
        fn: Callable[..., Any],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        group: bool = True,
    ) -> Any:
        with tf.device(variable.device):
            return fn(variable, *args, **(kwargs or {}))


def device_of(variables: Sequence[Any], index: int = 0) -> str | None:
    """Return the device of the first variable; None without variables."""
    for variable in variables:
        return component(getattr(variable, "_value", variable), index).device
    return None


@contextlib.contextmanager
def updating(
    optimizer: Any,
    only: Shares | None = None,
) -> Iterator[None]:
    """Make an optimizer, and optimizers it wraps, use fewer operations."""
    # ``only`` has the weights that this rank updates; None: all.
    default = _AtTheVariable(tf.distribute.get_strategy(), only)
    with contextlib.ExitStack() as stack:
        for each in optimizers_in(optimizer):
            methods = {
                **update_rules.shadows(each),
                **(only.shadows() if only is not None else {}),
            }
            mine = patches.bound(each, methods)
            mine["_distribution_strategy"] = default
            stack.enter_context(patches.shadowed(each, mine))
        yield


def variables_of_update(optimizer: Any, variables: Sequence[Any]) -> list[Any]:
    """Return variables with the optimizer's state and trained weights."""
    known = [*variables, *optimizer.variables]
    for each in optimizers_in(optimizer):
        known.extend(each._trainable_variables)
    return known


@contextlib.contextmanager
def as_one_device(
    optimizer: Any,
    trainable_variables: Sequence[Any],
    index: TowerOf = 0,
    only: Shares | None = None,
) -> Iterator[None]:
    """Run an optimizer as if its variables existed only once.

    Inside, the Keras variables of the model and of the optimizer resolve to
    their components on one tower, or that of each variable, and no strategy is
    active. Operations that do not update a variable run on the device of the
    first one.
    """
    known = variables_of_update(optimizer, trainable_variables)
    device = device_of(trainable_variables, 0 if callable(index) else index)
    with (
        compat.single_device_mode(),
        updating(optimizer, only),
        variables_lib.viewed(
            [v for v in known if isinstance(v, keras.Variable)],
            lambda v: component(v, index),
        ),
        tf.device(device),
    ):
        yield
